"""Gradient norms that are numbers, and far from what they were."""

import math
from collections import deque
from collections.abc import Iterable
from statistics import median
from typing import Any

_KNOWN, _ENOUGH = 100, 20  # steps


class SpikeLimit:
    """The gradient norm above which a step is a spike: `factor` times the median of the last 100 good steps.

    There is none before 20 steps are known, or where `factor` is None. Norms are learned whenever values are
    read; the limit moves only where `move` is called, so that a resumed run has the same one at each step.
    """

    def __init__(self, factor: float | None):
        self.factor = factor
        self.norms: deque[float] = deque(maxlen=_KNOWN)
        self.value = math.inf

    def learn(self, norms: Iterable[float]) -> None:
        """Take gradient norms of good steps, in their order."""
        self.norms.extend(norms)

    def move(self) -> None:
        """Bring the limit to what is known by now."""
        if self.factor is not None and len(self.norms) >= _ENOUGH:
            self.value = self.factor * median(self.norms)

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"norms": list(self.norms), "limit": None if math.isinf(self.value) else self.value}

    def restore(self, state: dict[str, Any]) -> None:
        """Take what `state` gave."""
        self.norms = deque(state["norms"], maxlen=_KNOWN)
        self.value = math.inf if state["limit"] is None else state["limit"]
