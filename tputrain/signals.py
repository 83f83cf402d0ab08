"""SIGINT and SIGTERM during training: remembered, and acted on between two steps."""

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class Interrupted(SystemExit):
    """Training ended by a signal after its checkpoint was written; exits with 128 + the signal's number."""

    def __init__(self, number: int):
        super().__init__(128 + number)
        self.number = number


class SignalWatch:
    """Context that turns SIGINT and SIGTERM into `received`; a second signal ends the process at once.

    The handler only sets an attribute, so asking costs nothing and the device is never waited for. Python
    delivers signals to the main thread only: elsewhere nothing is watched.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "SignalWatch":
        self.received = None
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            os._exit(128 + number)
        self.received = number
        name = signal.Signals(number).name
        # Not print: the signal may have come in the middle of one, which Python's streams do not bear.
        os.write(2, f"\n{name}: saving after this step, then leaving (again: leave at once)\n".encode())

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()
