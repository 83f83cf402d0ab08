"""Which learning rates a sweep goes through. Imports no PyTorch."""

import math
from dataclasses import dataclass

from tputrain.config_checks import Settings, expect, expect_above, expect_at_least


@dataclass(frozen=True)
class SweepConfig(Settings):
    """From which learning rate to which, in how many steps; each is the one before times the same factor."""

    lowest: float = 1e-6
    highest: float = 1.0
    steps: int = 100

    def __post_init__(self) -> None:
        expect_above("--lowest", self.lowest, 0.0)
        expect(self.lowest < self.highest, "--highest", self.highest, f"more than --lowest={self.lowest:g}")
        expect(math.isfinite(self.highest), "--highest", self.highest, "a finite number")
        expect_at_least("--steps", self.steps, 20)

    def rate(self, step: int) -> float:
        """The learning rate of step `step`, from 0."""
        return self.lowest * (self.highest / self.lowest) ** (step / (self.steps - 1))
