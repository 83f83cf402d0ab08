"""Work in the background that leaves the processors to the training."""

import threading
import time

_RESTS = 15  # times as long as it works


def no_rest() -> None:
    """For work that somebody waits for."""


class Pace:
    """What a thread asks between two pieces of its work: `rest`; what it rests for ends where it is hurried.

    A training step on the CPU has use for every core, so whatever else is computed meanwhile makes it longer:
    at this pace by a few percent, where one burst would cost one step a fifth of its time.
    """

    def __init__(self) -> None:
        self._hurried = threading.Event()
        self._rested_at = 0.0  # on the clock of the thread's own processor time

    def rest(self) -> None:
        """Sleep in proportion to the processor time that this thread spent since the last time it asked."""
        worked = time.thread_time() - self._rested_at
        self._hurried.wait(_RESTS * worked)
        self._rested_at = time.thread_time()

    def hurry(self) -> None:
        """Somebody waits for that thread now: it rests no more."""
        self._hurried.set()
