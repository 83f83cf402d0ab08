"""What a logger is. All methods get host values: a logger never causes a read of the device."""

from pathlib import Path
from typing import Any

from tputrain.errors import UserError

Record = dict[str, Any]
"""One step or one evaluation: names to plain numbers."""


def numbers_of(record: Record) -> dict[str, float]:
    """What of a record can be drawn as a curve: all but the step and exact copies (`..._hex`)."""
    return {
        name: value
        for name, value in record.items()
        if isinstance(value, int | float) and name != "step" and not name.endswith("_hex")
    }


def expect_run_dir(run_dir: Path | None, setting: str) -> Path:
    """`run_dir`; UserError where there is none, and `setting` (key=value) wants one to write to."""
    if run_dir is None:
        raise UserError(f"{setting}: no run_dir was given, so there is nowhere to write to: set run_dir")
    return run_dir


class Logger:
    """Override what you need; everything here does nothing."""

    total_steps: int | None = None
    """Of the run, as far as is known at each `log`; None: that cannot be told (`trainer.duration=30min`)."""

    def start(self, step: int, total_steps: int | None, resumed: bool) -> None:
        """`resumed`: go on from `step`; drop what was logged after it. Not resumed: the run begins; drop
        everything logged before.

        `total_steps`: of the run; None: that is not known yet (`trainer.duration`). Later it is in
        `self.total_steps`.
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
