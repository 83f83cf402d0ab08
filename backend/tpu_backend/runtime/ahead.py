"""Programs that threads compile before they are asked for: the parts of a step all at once, then the one
program that follows such steps; and what was rehearsed.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
import threading
import time
from collections.abc import Callable, Hashable
from concurrent import futures
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import Any
from weakref import WeakSet

from jax._src import api

from tpu_backend import _C
from tpu_backend.runtime.program_key import NO_PART_OF_A_PROGRAM

# Seconds at the end of the process: a thread that has not moved in Python for so long is in XLA; one that
# moves is waited for so long.
_IN_XLA = 0.5
_LONGEST_TRACE = 20.0
_MOST_UNWANTED = 512  # programs; more than the different parts of a step

_promised: dict[Hashable, Future[Any]] = {}
_given_up: WeakSet[Future[Any]] = WeakSet()
_threads: _Threads | None = None


class _Threads:
    """Like a ThreadPoolExecutor, which the end of the interpreter would wait for."""

    def __init__(self) -> None:
        self.is_ending = False  # they begin nothing more
        self._tasks: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name="compile ahead", daemon=True)
            for _ in range(os.cpu_count() or 1)
        ]
        for thread in self._threads:
            thread.start()

    def begin(self, task: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        self._tasks.put((future, task))
        return future

    def places(self) -> list[tuple[int, int]]:
        """Where in Python each of them is."""
        frames = sys._current_frames()
        found = [frames[each.ident] for each in self._threads if each.ident in frames]
        return [(id(frame), frame.f_lasti) for frame in found]

    def _work(self) -> None:
        _C.mark_compile_thread()
        while True:
            future, task = self._tasks.get()
            if self.is_ending:
                return
            future.set_running_or_notify_cancel()
            try:
                future.set_result(task())
            except BaseException as error:
                future.set_exception(error)
            del future, task  # the next one may be long in coming


def begin(description: dict[str, Any], compile_now: Callable[[dict[str, Any]], Any]) -> None:
    """Have a thread compile the program of a segment; they take them in this order. The end of the process
    does not wait for them.
    """
    global _threads
    if _threads is None:
        _threads = _Threads()
        atexit.register(_leave_threads)
    key = key_of(description)
    if key not in _promised:
        _forget_unwanted()
        _promised[key] = _threads.begin(partial(compile_now, description))


def _leave_threads() -> None:
    """At exit. XLA cannot be interrupted: a thread that is in there works on until the process has ended, and
    nothing that it may use is taken down. One that runs Python is waited for: it would meet Python's end.
    """
    if _threads is None or _C.is_forked():
        return
    _threads.is_ending = True
    deadline = time.monotonic() + _LONGEST_TRACE
    places, since = _threads.places(), time.monotonic()
    while _is_running() and time.monotonic() < min(deadline, since + _IN_XLA):
        time.sleep(0.05)
        if (places_now := _threads.places()) != places:
            places, since = places_now, time.monotonic()
    if _is_running():
        atexit.unregister(api.clean_up)
        gc.disable()
        _C.leave_threads()


def _is_running() -> bool:
    """Whether a thread compiles now."""
    return any(future.running() for future in _promised.copy().values())


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
