"""Waiting for launches that other ranks take part in: with a limit, and an eye on the others."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

import jax

from tpu_backend import _C
from tpu_backend.distributed import start

_LOOK = 0.05  # seconds between two looks at the other ranks
_READ = "waiting for the device"
_GRACE = 1.0  # seconds in which a program that a peer has left ends by itself, or its cause comes to light


def wait_for_call(token: Any, seconds: float, description: str, group: str, number: int) -> None:
    """Return when the launch of this token is done: call `number` of `group`; None: it is done.

    Raises RuntimeError when another rank has failed, or after `seconds`.
    """

    def why_late() -> str:
        assert start.peers is not None
        return start.peers.why_late(group, number, seconds)

    if token is not None:
        _watched(token.block_until_ready, seconds, description, why_late)


def _watched(act: Callable[[], Any], seconds: float, what: str, why_late: Callable[[], str]) -> Any:
    """What `act` gives, which a thread waits for: if it never comes, that thread is left behind."""
    outcome: list[Any] = []
    errors: list[Exception] = []
    is_done = threading.Event()

    def run() -> None:
        try:
            outcome.append(act())
        except Exception as error:
            errors.append(error)
        is_done.set()

    threading.Thread(target=run, name="tpu_wait", daemon=True).start()
    begin, failed_at = time.monotonic(), 0.0
    while not is_done.wait(_LOOK):
        now = time.monotonic()
        failure = None if start.peers is None else start.peers.failure()
        if failure is not None:
            failed_at = failed_at or now
            if now - failed_at > _GRACE:
                _fail("", failure)
        if now - begin > seconds:
            _fail(what, why_late())
    if errors and isinstance(errors[0], jax.errors.JaxRuntimeError):
        _explain(errors[0], what)
    if errors:
        raise errors[0]
    return outcome[0]


def _explain(error: Exception, what: str) -> NoReturn:
    """Raise an error of a program of many ranks again, with what is known of them."""
    deadline = time.monotonic() + _GRACE
    while start.peers is not None and start.peers.failure() is None and time.monotonic() < deadline:
        time.sleep(_LOOK)
    failure = None if start.peers is None else start.peers.failure()
    if failure is not None:
        _fail("", failure, error)
    _fail(what, str(error).splitlines()[0], error)


def _fail(what: str, why: str, cause: Exception | None = None) -> NoReturn:
    if start.peers is not None:
        start.peers.has_failed = True
    raise RuntimeError(f"{what}: {why}" if what else why) from cause


def watched(wait: Callable[..., Any]) -> Callable[..., Any]:
    """A wait for the device that also watches the other ranks, where there are any."""

    def waiting(*args: Any) -> Any:
        if start.peers is None:
            return wait(*args)
        peers = start.peers

        def why_late() -> str:
            if peers.last_call is None:
                return f"not done after {peers.timeout:.0f} s"
            return peers.why_late(*peers.last_call, peers.timeout)

        peers.confirm(peers.timeout)
        return _watched(lambda: wait(*args), peers.timeout, _READ, why_late)

    return waiting


def end() -> None:
    """At exit of a rank: its last calls are compared, and what was launched is waited for. Where a rank has
    failed the process ends at once: a thread of XLA's would wait for that rank for ever.
    """
    peers = start.peers
    assert peers is not None
    if peers.failure() is None and not peers.has_failed:
        try:
            peers.confirm(peers.timeout)
            _C.wait_for_launches(0)
        except Exception as error:
            peers.has_failed = True
            print(f"tpu: found at exit: {error}", file=sys.stderr)
    if peers.failure() is not None and not peers.has_failed:
        print(f"tpu: this rank ends with 1: {peers.failure()}", file=sys.stderr)
    peers.say_farewell()
    if peers.failure() is not None or peers.has_failed:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
