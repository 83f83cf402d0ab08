"""Work in the background that leaves the processors to the training."""

import threading
import time

_RESTS = 40  # times as long as it works


def no_rest() -> None:
    """For work that somebody waits for."""


class Pace:
    """What a thread asks between two pieces of its work: `rest`. Where it is hurried, it rests no more.

    A training step on the CPU has use for every core, and waits for the slowest of them: whatever is computed
    meanwhile makes it longer by as much. At this pace that is a few percent of some steps, where one burst
    would cost one step a fifth.
    """

    def __init__(self, longest: float):
        """`longest`: seconds of rest in all."""
        self._left = longest
        self._hurried = threading.Event()
        self._rested_at = 0.0  # on the clock of the thread's own processor time

    def rest(self) -> None:
        """Sleep in proportion to the processor time that this thread spent since the last time it asked."""
        seconds = min(_RESTS * (time.thread_time() - self._rested_at), self._left)
        self._left -= seconds
        self._hurried.wait(seconds)
        self._rested_at = time.thread_time()

    def hurry(self) -> None:
        """Somebody waits for that thread now."""
        self._hurried.set()
