"""SIGINT and SIGTERM during training: remembered, and acted on between two steps."""

import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from types import FrameType, TracebackType
from typing import Any, NoReturn, TypeVar

from tputrain.announce import warn

WATCHED = (signal.SIGINT, signal.SIGTERM)
T = TypeVar("T")
_END = 0  # no signal has this number


class Interrupted(SystemExit):
    """Training ended by a signal after its checkpoint was written; exits with 128 + the signal's number."""

    def __init__(self, number: int):
        super().__init__(128 + number)
        self.number = number


class WaitBrokenError(BaseException):
    """A wait was given up because of a signal. No Exception: a loader must not take it for one of its own."""


class SignalWatch:
    """Context that turns SIGINT and SIGTERM into `received`; a second signal ends the process at once.

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
        self._rescue: Callable[[int], NoReturn] | None = None
        self._rescue_lock = threading.Lock()
        self._listener: threading.Thread | None = None
        self._pipe = -1
        self._pipe_before = -1

    def __enter__(self) -> "SignalWatch":
        if threading.current_thread() is threading.main_thread():
            self._start_listening()
            for number in WATCHED:
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()
        self._stop_listening()
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
        if self.received is None:
            self.received = number
        if self._waiter is not None and _is_called_by(frame, self._waiter):
            raise WaitBrokenError

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
            for number in os.read(reading, 64):
                if number == _END:
                    os.close(reading)
                    return
                if number not in WATCHED:
                    continue
                name = signal.Signals(number).name
                if first is not None:
                    cost = ", what came after the last checkpoint is lost" if self._saves else ""
                    warn(f"{name} again: leaving at once{cost}")
                    os._exit(128 + number)
                first = number
                then = "saving after this step, then leaving" if self._saves else "leaving after this step"
                warn(f"{name}: {then} (again: leave at once)")

    def _call_rescue(self, number: int) -> None:
        with self._rescue_lock:
            if self._rescue is not None:
                self._rescue(number)


def _is_called_by(frame: FrameType | None, caller: FrameType) -> bool:
    """Whether `frame` runs in something that `caller` called, and is not `caller` itself."""
    if frame is caller:
        return False
    while frame is not None and frame is not caller:
        frame = frame.f_back
    return frame is caller


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
