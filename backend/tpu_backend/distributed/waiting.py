"""Waiting for launches that other ranks take part in: with a limit, and an eye on the others."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import wait
from typing import Any, NoReturn

import jax

from tpu_backend import _C
from tpu_backend.distributed import peers
from tpu_backend.runtime import waiter
from tpu_backend.runtime.user_line import user_line
from tpu_backend.untraced import untraced

_LOOK = 0.05  # seconds between two looks at the other ranks
_READ = "waiting for the device"
_STUCK = 4.0  # seconds after an abort in which launches end, or the process does
_GRACE = 1.0  # seconds in which a program that a peer has left ends by itself
_CAUSE = 3.0  # seconds in which it comes to light why a program of many ranks has failed


@untraced
def wait_for_call(token: Any, seconds: float, description: str, group: str, number: int) -> None:
    """Return when the launch of this token is done; None: it is done. It was call `number` of `group`; 0: one
    of a region, which the ranks launch as a call of their own.

    Raises RuntimeError when another rank has failed, or after `seconds`.
    """

    def why_late() -> str:
        assert peers.world is not None
        call = peers.world.last_call if number == 0 else (group, number)
        assert call is not None
        return peers.world.why_late(*call, seconds)

    if token is not None:
        _watched(token.block_until_ready, seconds, description, why_late)


def _watched(act: Callable[[], Any], seconds: float, what: str, why_late: Callable[[], str]) -> Any:
    """What `act` gives, which the waiter's thread calls."""
    world = peers.world
    assert world is not None
    future = waiter.begin(act)
    begin, failed_at = time.monotonic(), 0.0
    aborted_before = world.aborted()
    while not wait([future], _LOOK).done:
        now = time.monotonic()
        failure, aborted = world.failure(), world.aborted()
        if failure is not None or aborted != aborted_before:
            failed_at = failed_at or now
            if now - failed_at > _GRACE:
                _fail("", failure or str(aborted))
        if now - begin > seconds:
            _fail(what, why_late())
    error = future.exception()
    if isinstance(error, jax.errors.JaxRuntimeError):
        _explain(error, what)
    return future.result()


def _explain(error: Exception, what: str) -> NoReturn:
    """Raise an error of a program of many ranks again, with what is known of them."""
    deadline = time.monotonic() + _CAUSE
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


def watched(act: Callable[..., Any]) -> Callable[..., Any]:
    """A wait for the device that also watches the other ranks, where there are any."""

    def waiting(*args: Any) -> Any:
        world = peers.world
        if world is None:
            return act(*args)
        world.confirm(world.timeout)
        if hasattr(args[0], "is_ready") and args[0].is_ready():  # an array: tokens cannot be asked
            return act(*args)

        def why_late() -> str:
            if world.last_call is None:
                return f"not done after {world.timeout:.0f} s"
            return world.why_late(*world.last_call, world.timeout)

        return _watched(lambda: act(*args), world.timeout, _READ, why_late)

    return waiting


@untraced
def abort(group: str) -> None:
    """Fail a group: who waits for the device hears so, and new calls are refused. If launches do not end
    then, nothing else can stop them: the process ends.
    """
    assert peers.world is not None
    text = peers.world.abort(group, user_line())

    def end_if_stuck() -> None:
        deadline = time.monotonic() + _STUCK
        while not _C.are_launches_done(0):
            if time.monotonic() > deadline:
                print(f"tpu: this rank ends with 1: {text}, and the device is stuck", file=sys.stderr)
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(1)
            time.sleep(_LOOK)

    threading.Thread(target=end_if_stuck, name="tpu_abort", daemon=True).start()
