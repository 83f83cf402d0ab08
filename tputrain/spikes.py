"""Gradient norms that are numbers, and far from what they were."""

import math
from collections import deque
from collections.abc import Iterable
from statistics import median

_KNOWN, _ENOUGH = 100, 20  # steps


class SpikeLimit:
    """The gradient norm above which a step is a spike: `factor` times the median of the last 100 good steps.

    There is none before 20 steps are known, or where `factor` is None. It moves when values are read, which
    is at log steps, and is in the checkpoint.
    """

    def __init__(self, factor: float | None):
        self.factor = factor
        self.norms: deque[float] = deque(maxlen=_KNOWN)
        self.value = math.inf

    def learn(self, norms: Iterable[float]) -> None:
        """Take gradient norms of good steps, in their order."""
        self.norms.extend(norms)
        if self.factor is not None and len(self.norms) >= _ENOUGH:
            self.value = self.factor * median(self.norms)

    def restore(self, norms: Iterable[float]) -> None:
        """Know these norms only: `list(norms)` of a checkpoint's."""
        self.norms.clear()
        self.value = math.inf
        self.learn(norms)
