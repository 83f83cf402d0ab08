"""SIGINT and SIGTERM during training: remembered, and acted on between two steps."""

import atexit
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, NoReturn, TypeVar

from tputrain.announce import warn

WATCHED = (signal.SIGINT, signal.SIGTERM)
T = TypeVar("T")
_HANDS_OVER = ("torch.multiprocessing.reductions", "multiprocessing.resource_sharer")
_END = 0  # no signal has this number
ECHO = 0.5
"""Seconds in which a second signal is the first again: `timeout` sends it to a process, then to its group."""


class Interrupted(SystemExit):
    """Training ended by a signal after its checkpoint was written; exits with 128 + the signal's number
    unless `code` is given.
    """

    def __init__(self, number: int, code: int | None = None):
        super().__init__(128 + number if code is None else code)
        self.number = number


class Terminated(SystemExit):
    """SIGTERM where nothing is trained: the counterpart of KeyboardInterrupt."""

    def __init__(self) -> None:
        super().__init__(128 + signal.SIGTERM)


class WaitBrokenError(BaseException):
    """A wait was given up because of a signal. No Exception: a loader must not take it for one of its own."""


class SignalWatch:
    """Context that turns SIGINT and SIGTERM into `received`; a second signal, half a second later or more,
    ends the process at once.

    The handler only sets an attribute, so asking costs nothing and the device is never waited for. But Python
    runs handlers in the main thread between two of its instructions, so never while that thread sits in a
    program that hangs, or in a compilation. What must work then as well is a thread's: the second signal, and
    the rescue, see `rescue_by`. The interpreter's C handler writes each signal's number into a pipe,
    whatever the main thread does.

    Python delivers signals to the main thread only: elsewhere nothing is watched.
    """

    grace = 15.0
    """Seconds that the main thread has to act on a signal; whoever stops machines gives about 30 in all."""

    def __init__(self, saves: bool = True) -> None:
        """`saves`: whether the main thread saves something before it leaves, which is said."""
        self._saves = saves
        self.received: int | None = None
        self._before: dict[int, Any] = {}
        self._waiter: FrameType | None = None
        self._is_unbreakable = False
        self._process = 0
        self._rescue: Callable[[int], NoReturn] | None = None
        self._rescue_lock = threading.Lock()
        self._listener: threading.Thread | None = None
        self._pipe = -1
        self._pipe_before = -1

    def __enter__(self) -> "SignalWatch":
        if threading.current_thread() is threading.main_thread():
            self._process = os.getpid()
            self._start_listening()
            for number in WATCHED:
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self._stop_listening()
        finally:
            for number, handler in self._before.items():
                signal.signal(number, handler)
            self._before.clear()
            self.received = self._rescue = None

    def wait_for(self, fetch: Callable[[], T]) -> T | None:
        """`fetch()`, or None where a signal came first: whatever it waits for is given up then.

        It is broken off by a WaitBrokenError inside it, so it must leave things as they were when it raises.
        """
        # A signal that comes in this very frame must not raise: what was fetched would be lost.
        self._waiter = sys._getframe()
        try:
            return None if self.received is not None else fetch()
        except WaitBrokenError:
            return None
        finally:
            self._waiter = None

    @contextmanager
    def raised_at_the_end(self) -> Iterator[None]:
        """Raises Interrupted once what is in here is done, if a signal came, however late."""
        yield
        if self.received is not None:
            _end_quietly()
            raise Interrupted(self.received, self._exit_code(self.received))

    @contextmanager
    def unbroken(self) -> Iterator[None]:
        """What is done in here is done as a whole: a signal breaks the wait off before or after it."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self.break_if_received()
        self._is_unbreakable = True
        try:
            yield
        finally:
            self._is_unbreakable = False
        self.break_if_received()

    def break_if_received(self) -> None:
        """Where a signal came at a moment that could not be left: give up the wait, if it is one, now."""
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and self._waiter is not None and self.received is not None:
            raise WaitBrokenError

    def until_received(self, items: Iterable[T]) -> Iterator[T]:
        """`items`, which hold no None, and no more of them once a signal has come."""
        iterator = iter(items)
        while (item := self.wait_for(lambda: next(iterator, None))) is not None:
            yield item

    def rescue_by(self, rescue: Callable[[int], NoReturn] | None) -> None:
        """From here on, a signal that is not acted on within `grace` has a thread call `rescue(its number)`.

        For times in which the main thread may be busy with one long thing, such as a compilation. None: no
        longer; that waits for a rescue that has begun, which ends the process.
        """
        with self._rescue_lock:
            self._rescue = rescue

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            return  # a forked process leaves signals to its parent
        self._note(number)
        if self.received is None:
            return
        if self._waiter is not None and not self._is_unbreakable and _may_break(frame, self._waiter):
            raise WaitBrokenError

    def _note(self, number: int) -> None:
        if self.received is None:
            self.received = number

    def _exit_code(self, number: int) -> int:
        """Of the process, once all is saved."""
        return 128 + number

    def _what_follows(self) -> str:
        """What is said after a first signal."""
        return "saving after this step, then leaving" if self._saves else "leaving after this step"

    def _start_listening(self) -> None:
        global _open_pipe
        reading, self._pipe = os.pipe()
        os.set_blocking(self._pipe, False)  # as set_wakeup_fd demands
        self._listener = threading.Thread(target=self._listen, args=(reading,), name="signals", daemon=True)
        self._listener.start()
        self._pipe_before = signal.set_wakeup_fd(self._pipe, warn_on_full_buffer=False)
        _open_pipe = self._pipe

    def _stop_listening(self) -> None:
        global _open_pipe
        if self._listener is None:
            return
        _open_pipe = None
        signal.set_wakeup_fd(self._pipe_before)
        os.write(self._pipe, bytes([_END]))
        self._listener.join()
        os.close(self._pipe)
        self._listener = None

    def _listen(self, reading: int) -> None:
        """Until told to end: a line at the first signal, the end of the process at the second."""
        first: int | None = None
        had_its_chance = False
        while True:
            patience = None if first is None or had_its_chance else self.grace
            if not select.select([reading], [], [], patience)[0]:
                assert first is not None
                self._call_rescue(first)
                had_its_chance = True
                continue
            numbers = os.read(reading, 64)
            has_ended = _END in numbers
            if watched := [number for number in numbers if number in WATCHED]:
                name = signal.Signals(watched[0]).name
                if first is not None:
                    cost = ", what came after the last checkpoint is lost" if self._saves else ""
                    warn(f"{name} again: leaving at once{cost}")
                    os._exit(128 + watched[0])
                first = watched[0]
                warn(f"{name}: {self._what_follows()} (again: leave at once)")
                has_ended = has_ended or self._let_pass(reading)
            if has_ended:
                os.close(reading)
                return

    @staticmethod
    def _let_pass(reading: int) -> bool:
        """Read what comes within `ECHO`, also where this thread gets to it late; True at `_END`."""
        until = time.monotonic() + ECHO
        while True:
            patience = until - time.monotonic()
            is_there = bool(select.select([reading], [], [], max(patience, 0.0))[0])
            if is_there and _END in os.read(reading, 64):
                return True
            if patience <= 0 and not is_there:
                return False

    def _call_rescue(self, number: int) -> None:
        with self._rescue_lock:
            if self._rescue is not None:
                self._rescue(number)


def _may_break(frame: FrameType | None, waiter: FrameType) -> bool:
    """Whether `frame` runs in something that `waiter` called, not in `waiter` itself, and may be left."""
    if frame is waiter:
        return False
    while frame is not None and frame is not waiter:
        # What is raised in a destructor is only printed. A worker that hands a tensor over, and is left alone
        # with it, prints that.
        if frame.f_code.co_name == "__del__" or frame.f_globals.get("__name__") in _HANDS_OVER:
            return False
        frame = frame.f_back
    return frame is waiter


def _end_quietly() -> None:
    """Have a signal that comes while this process ends, with all saved, change nothing but when."""
    global _ends_quietly
    if not _ends_quietly:
        _ends_quietly = True
        shown = sys.excepthook

        def shows(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            if not issubclass(kind, KeyboardInterrupt):
                shown(kind, error, trace)

        # One that comes on the way out of the script, when no SignalWatch is left.
        sys.excepthook = shows
        # Called before threads are waited for; there is no public place that is.
        threading._register_atexit(_leave_at_once)  # type: ignore[attr-defined]
        # What is left then is short. Python's own handlers it takes away before the process is gone.
        atexit.register(_ignore)


def _leave_at_once() -> None:
    for number in WATCHED:
        signal.signal(number, lambda number, frame: os._exit(128 + number))


def _ignore() -> None:
    for number in WATCHED:
        signal.signal(number, signal.SIG_IGN)


_ends_quietly = False

_open_pipe: int | None = None
"""Where this process's signals go while it is watched."""


def is_watching() -> bool:
    """Whether some SignalWatch takes this process's signals now."""
    return _open_pipe is not None


def _leave_the_pipe_to_the_parent() -> None:
    # A Ctrl-C on the terminal reaches the workers of a data loader too, and must not count once for each.
    if _open_pipe is not None:
        signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_leave_the_pipe_to_the_parent)
