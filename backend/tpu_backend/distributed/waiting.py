"""Waiting for launches that other ranks take part in: with a limit, and an eye on the others."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

import jax

from tpu_backend.distributed import peers

_LOOK = 0.05  # seconds between two looks at the other ranks
_READ = "waiting for the device"
_GRACE = 1.0  # seconds in which a program that a peer has left ends by itself, or its cause comes to light


def wait_for_call(token: Any, seconds: float, description: str, group: str, number: int) -> None:
    """Return when the launch of this token is done: call `number` of `group`; None: it is done.

    Raises RuntimeError when another rank has failed, or after `seconds`.
    """

    def why_late() -> str:
        assert peers.world is not None
        return peers.world.why_late(group, number, seconds)

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
        failure = None if peers.world is None else peers.world.failure()
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
    while peers.world is not None and peers.world.failure() is None and time.monotonic() < deadline:
        time.sleep(_LOOK)
    failure = None if peers.world is None else peers.world.failure()
    if failure is not None:
        _fail("", failure, error)
    _fail(what, str(error).splitlines()[0], error)


def _fail(what: str, why: str, cause: Exception | None = None) -> NoReturn:
    if peers.world is not None:
        peers.world.has_raised = True
    raise RuntimeError(f"{what}: {why}" if what else why) from cause


def watched(wait: Callable[..., Any]) -> Callable[..., Any]:
    """A wait for the device that also watches the other ranks, where there are any."""

    def waiting(*args: Any) -> Any:
        world = peers.world
        if world is None:
            return wait(*args)

        def why_late() -> str:
            if world.last_call is None:
                return f"not done after {world.timeout:.0f} s"
            return world.why_late(*world.last_call, world.timeout)

        world.confirm(world.timeout)
        return _watched(lambda: wait(*args), world.timeout, _READ, why_late)

    return waiting
