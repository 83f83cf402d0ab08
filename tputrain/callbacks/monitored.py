"""Which of two evaluations is the better one."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tputrain.config_checks import did_you_mean, nearest
from tputrain.errors import UserError
from tputrain.loggers.logger import Record

if TYPE_CHECKING:
    from tputrain.trainer import Trainer

MODES = ("min", "max")


@dataclass(frozen=True)
class Monitored:
    """A number of every evaluation, and whether less of it is better (min) or more (max)."""

    key: str
    """The setting that named it, such as callbacks.early_stopping.metric; for errors."""
    metric: str
    mode: str
    min_delta: float = 0.0
    """How much better counts as better."""

    def value(self, result: Record) -> float:
        """The number in `result`. Raises UserError where there is none of that name."""
        if self.metric in result:
            return float(result[self.metric])
        known = [name for name in result if name not in ("step", "loss_hex", "seconds")]
        hint = did_you_mean(nearest(self.metric, known))
        raise UserError(f"{self.key}={self.metric}: evaluations have {', '.join(known)}{hint}")

    def is_better(self, value: float, best: float | None) -> bool:
        """Whether `value` beats `best` (None: there is none yet). What is not finite never does."""
        if not math.isfinite(value):
            return False
        if best is None:
            return True
        gain = best - value if self.mode == "min" else value - best
        return gain > self.min_delta

    def expect_evaluations(self, trainer: "Trainer") -> None:
        """Raise UserError where `trainer` never evaluates: what watches evaluations would do nothing."""
        if trainer.val_loader is None:
            raise UserError(
                f"{self.key}={self.metric}: the Trainer has no val_loader, so there is no evaluation "
                "to watch: give it one, or leave this callback out"
            )
