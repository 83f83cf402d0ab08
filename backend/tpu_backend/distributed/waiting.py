"""Waiting for launches that other ranks take part in: with a limit, and an eye on the others."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NoReturn

import jax

from tpu_backend.distributed import start

_PAUSE = 0.0005  # seconds, at first
_LONGEST_PAUSE = 0.05
_GRACE = 2.0  # seconds in which a program that a peer has left ends by itself, and says of what


def wait_for_launch(launch: int, seconds: float, description: str) -> None:
    """Return when launch number `launch` of the current device is done.

    Raises RuntimeError after `seconds`, or when another rank has failed.
    """
    from tpu_backend import _C

    wait_until(lambda: _C.is_launch_done(launch), seconds, description)


def wait_until(is_done: Callable[[], bool], seconds: float, description: str) -> None:
    """Return when `is_done`, with the errors of `wait_for_launch`."""
    begin, pause, failed_at = time.monotonic(), _PAUSE, None
    while True:
        try:
            if is_done():
                return
        except jax.errors.JaxRuntimeError as error:
            explain(error, description)
        now = time.monotonic()
        failure = None if start.peers is None else start.peers.failure()
        if failure is not None:
            failed_at = failed_at or now
            if now - failed_at > _GRACE:
                raise RuntimeError(f"{description} cannot end: {failure}")
        if now - begin > seconds:
            raise RuntimeError(
                f"{description} did not end within {seconds:.0f} s: not all of its ranks have called it"
            )
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)


def explain(error: Exception, description: str) -> NoReturn:
    """Raise an error of a program of many ranks again, with what is known of them."""
    deadline = time.monotonic() + _GRACE
    failure = None
    while start.peers is not None and failure is None and time.monotonic() < deadline:
        failure = start.peers.failure()
        time.sleep(_LONGEST_PAUSE)
    why = f": {failure}" if failure else ""
    raise RuntimeError(f"{description} failed{why} ({str(error).splitlines()[0]})") from error


def of_rank(wait: Callable[..., Any]) -> Callable[..., Any]:
    """Make a wait for the device name other ranks where they are why it fails."""

    def waiting(*args: Any) -> Any:
        if start.peers is None:
            return wait(*args)
        try:
            return wait(*args)
        except jax.errors.JaxRuntimeError as error:
            explain(error, "a program of this and other ranks")

    return waiting
