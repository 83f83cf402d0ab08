"""What a logger is. All methods get host values: a logger never causes a read of the device."""

from dataclasses import dataclass
from typing import Any

from tputrain.config_checks import expect_at_least, expect_choice

Record = dict[str, Any]
"""One step or one evaluation: names to plain numbers."""


@dataclass(frozen=True)
class LogConfig:
    """How often values are read from the device, and how progress is shown."""

    every: int = 10
    """Steps between reads of the device; every step is logged all the same."""
    progress: str = "auto"
    """bar, plain, none, or auto: a bar on a terminal, plain lines elsewhere."""

    def __post_init__(self) -> None:
        expect_at_least("log.every", self.every, 1)
        expect_choice("log.progress", self.progress, ("auto", "bar", "plain", "none"))


class Logger:
    """Override what you need; everything here does nothing."""

    def start(self, step: int, total_steps: int, resumed: bool) -> None:
        """The run goes on from `step` of a checkpoint (resumed): forget what was logged after it.

        Not resumed, it begins: forget everything, it is of a run that left nothing to go on from.
        """

    def after_step(self, step: int) -> None:
        """`step` was dispatched; its values are not known yet."""

    def log(self, records: list[Record]) -> None:
        """One record for every step since the last call, in order."""

    def log_evaluation(self, record: Record) -> None:
        """The result of an evaluation: `step`, `loss` and whatever else was measured."""

    def sync(self) -> None:
        """Everything logged so far must survive the loss of power: a checkpoint is about to be written."""

    def close(self) -> None:
        """The run ends, well or not."""
