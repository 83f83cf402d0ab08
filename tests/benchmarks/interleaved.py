"""Timing that survives a busy machine: targets take turns, and their minima are compared.

A shared machine moves medians by tens of percent from one minute to the next.  Interleaved rounds let every
target see the same minutes, and the minimum is the figure that the other processes disturbed least.
"""

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Timing:
    """The seconds that one call took, in each round."""

    seconds: tuple[float, ...]

    @property
    def minimum(self) -> float:
        return min(self.seconds)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """How much longer the slowest round took than the fastest, as a fraction of the fastest."""
        return max(self.seconds) / self.minimum - 1

    def __str__(self) -> str:
        unit, factor = ("ms", 1e3) if self.minimum >= 1e-4 else ("µs", 1e6)
        figures = f"median {self.median * factor:.2f}, spread {self.spread:.0%}"
        return f"{self.minimum * factor:.2f} {unit} ({figures})"


def interleave(
    targets: Mapping[str, Callable[[int], None]], *, calls: int, rounds: int = 5, warmup_calls: int = 5
) -> dict[str, Timing]:
    """Time each target in `rounds` rounds, one after the other in each, the order turning by one a round.

    A target is called with a number of calls to make, and returns when all of them are done: nothing
    asynchronous may be left.  The figures are seconds a call.
    """
    assert rounds >= 5, "fewer rounds say nothing on a shared machine"
    for run in targets.values():
        run(warmup_calls)
    names = list(targets)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    gc.collect()
    gc.freeze()  # what is there stays, so that a collection a turn costs nothing and many rounds are possible
    try:
        for turn in range(rounds):
            for offset in range(len(names)):
                name = names[(turn + offset) % len(names)]
                gc.collect()
                start = time.perf_counter()
                targets[name](calls)
                seconds[name].append((time.perf_counter() - start) / calls)
    finally:
        gc.unfreeze()
    return {name: Timing(tuple(values)) for name, values in seconds.items()}
