"""SIGINT and SIGTERM during training: remembered, and acted on between two steps."""

import os
import signal
import threading
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any

WATCHED = (signal.SIGINT, signal.SIGTERM)
_END = 0  # no signal has this number


class Interrupted(SystemExit):
    """Training ended by a signal after its checkpoint was written; exits with 128 + the signal's number."""

    def __init__(self, number: int):
        super().__init__(128 + number)
        self.number = number


class SignalWatch:
    """Context that turns SIGINT and SIGTERM into `received`; a second signal ends the process at once.

    The handler only sets an attribute, so asking costs nothing and the device is never waited for. But Python
    runs handlers in the main thread between two of its instructions, so never while that thread sits in a
    program that hangs. What must work then as well, the second signal, is a thread's: the interpreter's C
    handler writes each signal's number into a pipe, whatever the main thread does.

    Python delivers signals to the main thread only: elsewhere nothing is watched.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._before: dict[int, Any] = {}
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
        self.received = None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received = number

    def _start_listening(self) -> None:
        global _open_pipe
        reading, self._pipe = os.pipe()
        os.set_blocking(self._pipe, False)  # as set_wakeup_fd demands
        self._listener = threading.Thread(target=_listen, args=(reading,), name="signals", daemon=True)
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


def _listen(reading: int) -> None:
    """Until told to end: a line at the first signal, the end of the process at the second."""
    has_come = False
    while True:
        for number in os.read(reading, 64):
            if number == _END:
                os.close(reading)
                return
            if number not in WATCHED:
                continue
            name = signal.Signals(number).name
            if has_come:
                _tell(f"{name} again: leaving at once, what came after the last checkpoint is lost")
                os._exit(128 + number)
            has_come = True
            _tell(f"{name}: saving after this step, then leaving (again: leave at once)")


def _tell(line: str) -> None:
    # Not print: its lock may be held by a thread that hangs. And whoever read this may have gone.
    with suppress(OSError):
        os.write(2, f"\n{line}\n".encode())


_open_pipe: int | None = None
"""Where this process's signals go while it is watched."""


def _leave_the_pipe_to_the_parent() -> None:
    # A Ctrl-C on the terminal reaches the workers of a data loader too, and must not count once for each.
    if _open_pipe is not None:
        signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_leave_the_pipe_to_the_parent)
