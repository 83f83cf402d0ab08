"""Keeps the checkpoint of the best evaluation, whatever else is removed."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tputrain.announce import say
from tputrain.callbacks.callback import Callback
from tputrain.callbacks.monitored import MODES, Monitored
from tputrain.config_checks import expect_choice
from tputrain.errors import UserError
from tputrain.loggers.logger import Record

if TYPE_CHECKING:
    from tputrain.trainer import Trainer

_KEY = "callbacks.best_checkpoint"
LINK = "best"
"""In `checkpoints/`: a symbolic link to the directory of the best checkpoint."""


@dataclass(frozen=True)
class BestCheckpointConfig:
    """Which evaluation is the best."""

    metric: str | None = None
    """The number that decides, by its name in evaluations.jsonl, such as loss; None: no best is kept."""
    mode: str = "min"
    """min: less is better; max: more is."""

    def __post_init__(self) -> None:
        expect_choice(f"{_KEY}.mode", self.mode, MODES)


class BestCheckpoint(Callback):
    """Has every evaluation that is the best so far saved; `checkpoints/best` leads to it.

    It is kept beside those that `checkpoint.keep_last` and `checkpoint.keep_every` keep, until a better one
    is complete. The evaluation before the first step does not count: nothing was learned yet.
    """

    def __init__(self, metric: str = "loss", mode: str = "min"):
        self.cfg = BestCheckpointConfig(metric, mode)
        self.monitored = Monitored(f"{_KEY}.metric", metric, mode)
        self.best: float | None = None
        self.step: int | None = None
        """Of the best evaluation."""

    def on_fit_start(self, trainer: "Trainer") -> None:
        self.monitored.expect_evaluations(trainer)
        if trainer.store is None:
            raise UserError(
                f"{_KEY}.metric={self.monitored.metric}: no run_dir was given, so there is nowhere to save to"
            )
        self._keep(trainer)

    def on_evaluate(self, trainer: "Trainer", result: Record) -> None:
        value = self.monitored.value(result)
        if trainer.step > 0 and self.monitored.is_better(value, self.best):
            self.best, self.step = value, trainer.step
            trainer.control.save = True
            self._keep(trainer)

    def on_save(self, trainer: "Trainer", checkpoint: Path) -> None:
        if (
            trainer.store is not None
            and self.step is not None
            and checkpoint == trainer.store.path(self.step)
        ):
            _link(checkpoint)

    def _keep(self, trainer: "Trainer") -> None:
        assert trainer.store is not None
        # The old best is removed after the next checkpoint, which is the new best, is complete.
        trainer.store.kept = set() if self.step is None else {self.step}

    def state_dict(self) -> dict[str, Any]:
        """The best value, and its step."""
        return {"metric": self.monitored.metric, "best": self.best, "step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from the best so far, unless another number decides now."""
        if state["metric"] == self.monitored.metric:
            self.best, self.step = state["best"], state["step"]


def _link(checkpoint: Path) -> None:
    """Lead `best` to `checkpoint`, at once and without a moment in which it leads nowhere."""
    new = checkpoint.with_name(f".{LINK}-new")
    try:
        new.unlink(missing_ok=True)
        new.symlink_to(checkpoint.name, target_is_directory=True)
        os.replace(new, checkpoint.with_name(LINK))
    except OSError as error:
        say(f"note: {checkpoint.with_name(LINK)} does not lead to {checkpoint.name} ({error.strerror})")
