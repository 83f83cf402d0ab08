"""Ends a run in time: before whoever lent the machine takes it back."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tputrain.announce import say
from tputrain.callbacks.callback import Callback
from tputrain.config_checks import Settings, expect_above

if TYPE_CHECKING:
    from tputrain.trainer import Trainer

_KEY = "callbacks.time_limit"


@dataclass(frozen=True)
class TimeLimitConfig(Settings):
    """How long a process may train."""

    minutes: float | None = None
    """Of wall clock, counted from the start of training in this process; None: no limit."""

    def __post_init__(self) -> None:
        expect_above(f"{_KEY}.minutes", self.minutes, 0.0)


class TimeLimit(Callback):
    """Asks for the end of the run after the first step that ends past `minutes`.

    That step is evaluated and saved like any last step, and a run started again has the whole time anew:
    leave enough of an allotted time for one step, one evaluation and one checkpoint. The clock is asked when
    a step is dispatched; the device may be some steps behind, at most `log.every`.
    """

    def __init__(self, minutes: float, clock: Callable[[], float] = time.monotonic):
        """`clock`: seconds, from wherever it likes."""
        self.cfg = TimeLimitConfig(minutes)
        self.minutes = minutes
        self._clock = clock
        self._started_at = 0.0

    def on_fit_start(self, trainer: "Trainer") -> None:
        self._started_at = self._clock()

    def on_step_end(self, trainer: "Trainer") -> None:
        minutes = (self._clock() - self._started_at) / 60
        if minutes >= self.minutes and not trainer.control.stop:
            trainer.control.stop = True
            say(
                f"time limit: step {trainer.step} ended after {minutes:.1f} minutes, "
                f"{_KEY}.minutes={self.minutes:g}; start the run again to go on"
            )
