"""How long a run is, as people write it: 500, 2ep, 1B tokens, 30min."""

import math
import re
import sys
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from tputrain.errors import UserError

if TYPE_CHECKING:
    from tputrain.loop.position import Position

_UNITS = {
    "steps": ("", "step", "steps"),
    "epochs": ("ep", "eps", "epoch", "epochs"),
    "tokens": ("tok", "toks", "token", "tokens"),
    "samples": ("sample", "samples"),
}
_SECONDS = {
    1.0: ("s", "sec", "second", "seconds"),
    60.0: ("min", "mins", "minute", "minutes"),
    3600.0: ("h", "hour", "hours"),
    86400.0: ("d", "day", "days"),
}
_MULTIPLES = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
_TEXT = re.compile(r"(\d+(?:[_,]\d{3})*(?:\.\d+)?(?:e\+?\d+)?)\s*([kKMBT]?)\s*([a-z]*)")
KEY = "trainer.duration"


@dataclass(frozen=True)
class Duration:
    """So many steps, epochs, tokens, samples or seconds; a run ends with the step that reaches it."""

    amount: float
    unit: str
    setting: str
    """As key=value."""

    @staticmethod
    @cache
    def of(text: str) -> "Duration":
        """What `text` says. Raises UserError where it says nothing of the kind."""
        if (match := _TEXT.fullmatch(text.strip())) is not None:
            digits, multiple, unit = match.groups()
            amount = float(digits.replace("_", "").replace(",", "")) * _MULTIPLES[multiple]
            for name, spellings in _UNITS.items():
                if unit in spellings and amount > 0:
                    return Duration(amount, name, f"{KEY}={text}")
            for seconds, spellings in _SECONDS.items():
                if unit in spellings and amount > 0:
                    return Duration(amount * seconds, "seconds", f"{KEY}={text}")
        raise UserError(
            f"{KEY}={text}: expected a number and a unit, such as 500 steps, 2ep, 1.5B tokens, 10k samples, "
            "30min or 2h"
        )

    def done(self, run: "Position") -> float:
        """How much of it the run has come to. Raises UserError where that is not known of this data."""
        if self.unit in ("tokens", "samples") and run.step > 0 and run.unit != self.unit:
            raise UserError(
                f"{self.setting}: this data is counted in {run.unit}: expected so many of them, or of steps"
            )
        if self.unit == "epochs" and run.epochs_done is None and run.step > 0:
            raise UserError(
                f"{self.setting}: the length of this train_loader is not known: expected another unit, or a "
                "loader with len(), or with epochs_at(step) beside batch_at"
            )
        of_unit = {"steps": run.step, "epochs": run.epochs_done or 0.0, "seconds": run.seconds}
        return of_unit.get(self.unit, run.num_done)

    @property
    def steps(self) -> int:
        """Of the run; the largest int where that depends on the data."""
        return math.ceil(self.amount) if self.unit == "steps" else sys.maxsize

    @property
    def doubled(self) -> str:
        """The setting for a run twice as long."""
        return f"{self.setting.partition('=')[0]}={2 * self.amount:.15g}" + (
            "" if self.unit == "steps" else f" {self.unit}"
        )

    def is_reached(self, run: "Position") -> bool:
        """Whether the run is done."""
        return self.done(run) >= self.amount

    def total_steps(self, run: "Position") -> int | None:
        """How many steps it comes to, as far as that can be told from those so far; None: it cannot."""
        if self.unit == "steps":
            return math.ceil(self.amount)
        done = self.done(run)
        if self.unit == "seconds" or done == 0.0:
            return None
        # A ratio of floats may be a little above the whole number that it stands for.
        return max(math.ceil(self.amount * run.step / done - 1e-6), run.step)


def seconds_of(text: str) -> float | None:
    """The time that `text` says, such as 30min; None: it says none."""
    with suppress(UserError):
        duration = Duration.of(text)
        return duration.amount if duration.unit == "seconds" else None
    return None
