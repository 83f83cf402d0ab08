"""Programs that threads compile before they are asked for: the parts of a step all at once, then the one
program that follows such steps; and what was rehearsed.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable, Hashable
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any
from weakref import WeakSet

from tpu_backend import _C
from tpu_backend.runtime.program_key import NO_PART_OF_A_PROGRAM

_MOST_UNWANTED = 512  # programs; more than the different parts of a step

_promised: dict[Hashable, Future[Any]] = {}
_given_up: WeakSet[Future[Any]] = WeakSet()
_threads: ThreadPoolExecutor | None = None
_is_exiting = False


def begin(description: dict[str, Any], compile_now: Callable[[dict[str, Any]], Any]) -> None:
    """Have a thread compile the program of a segment; they take them in this order. When the interpreter
    exits it waits for what is being compiled, since XLA cannot be left while it works, and drops the rest.
    """
    global _threads
    if _threads is None:
        _threads = ThreadPoolExecutor(
            os.cpu_count(), thread_name_prefix="compile ahead", initializer=_C.mark_compile_thread
        )
        # Called before the pool's own, which waits for its threads; there is no public place that is.
        threading._register_atexit(_begin_to_exit)  # type: ignore[attr-defined]
    key = key_of(description)
    if key not in _promised:
        _forget_unwanted()
        _promised[key] = _threads.submit(_unless_exiting, compile_now, description)


def _unless_exiting(compile_now: Callable[[dict[str, Any]], Any], description: dict[str, Any]) -> Any:
    return None if _is_exiting else compile_now(description)


def _begin_to_exit() -> None:
    global _is_exiting
    _is_exiting = True
    begun = _promised.copy().values()
    try:
        if futures.wait(begun, timeout=1.0).not_done:
            print(
                "tpu: waiting for a compilation in the background to end (Ctrl-C leaves it)",
                file=sys.stderr,
                flush=True,
            )
            futures.wait(begun)
    except KeyboardInterrupt:  # the interpreter must not end beside XLA's thread, but the process may
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(130)


def _forget_unwanted() -> None:
    """Programs that nobody has asked for, the oldest first: a step that was not taken again."""
    if len(_promised) <= _MOST_UNWANTED:
        return
    unwanted = [key for key, future in _promised.copy().items() if future.done()]
    for key in unwanted[: max(0, len(unwanted) - _MOST_UNWANTED)]:
        _promised.pop(key, None)


def wait(descriptions: list[dict[str, Any]], seconds: float | None = None) -> None:
    """Until threads are done with those of these that `begin` was told to compile, or for so long."""
    begun = [future for key in map(key_of, descriptions) if (future := _promised.get(key)) is not None]
    futures.wait(begun, seconds)


def is_compiling(description: dict[str, Any]) -> bool:
    """Whether `result` would have to wait for it."""
    future = _promised.get(key_of(description))
    return future is not None and not future.done()


def give_up(description: dict[str, Any]) -> None:
    """Nobody waits for it any more; it is taken when it is there."""
    _given_up.add(_promised[key_of(description)])


def is_given_up(description: dict[str, Any]) -> bool:
    return _promised.get(key_of(description)) in _given_up


def forget() -> None:
    """Wait until threads are done, and drop what they have made."""
    futures.wait(_promised.copy().values())
    _promised.clear()


def is_busy() -> bool:
    """Whether some of it is still to be done."""
    return any(not future.done() for future in _promised.copy().values())


def result(description: dict[str, Any], may_wait: bool) -> Any:
    """What `begin` was told to compile, waited for; None where it was not, or is not there and must not be
    waited for. It is given out once.
    """
    key = key_of(description)
    if (future := _promised.get(key)) is None or not (may_wait or future.done()):
        return None
    try:
        return future.result()
    finally:
        if future.done():  # else the wait was interrupted, and somebody may ask again
            _promised.pop(key, None)


def key_of(description: dict[str, Any]) -> Hashable:
    """All that decides a program, in this process: not where slices start that are its inputs."""
    starts = zip(description["offsets"], description["offset_is_input"], strict=True)
    decisive = description | dict.fromkeys(NO_PART_OF_A_PROGRAM)
    decisive["offsets"] = [None if is_input else start for start, is_input in starts]
    return repr(sorted(decisive.items()))
