"""Keeps the checkpoint of the best evaluation, whatever else is removed."""

import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tputrain.announce import say
from tputrain.callbacks.callback import Callback
from tputrain.callbacks.monitored import MODES, Monitored
from tputrain.config_checks import Settings, expect_choice
from tputrain.errors import UserError
from tputrain.loggers.logger import Record

if TYPE_CHECKING:
    from tputrain.trainer import Trainer

_KEY = "callbacks.best_checkpoint"
LINK = "best"
"""In `checkpoints/`: a symbolic link to the directory of the best checkpoint."""


@dataclass(frozen=True)
class BestCheckpointConfig(Settings):
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
    is complete. The evaluation before the first step does not count: nothing was learned yet. Of several such
    callbacks, each keeps its own; the links of all but the first are named `best-<metric>`.
    """

    def __init__(self, metric: str = "loss", mode: str = "min"):
        self.cfg = BestCheckpointConfig(metric, mode)
        self.monitored = Monitored(f"{_KEY}.metric", metric, mode)
        self.state_key = metric
        self._improvements: list[tuple[int, float]] = []  # steps and values, the best one last
        self._to_be_saved: set[int] = set()

    @property
    def best(self) -> float | None:
        """The best value so far."""
        return self._improvements[-1][1] if self._improvements else None

    @property
    def step(self) -> int | None:
        """Of the best evaluation."""
        return self._improvements[-1][0] if self._improvements else None

    def on_fit_start(self, trainer: "Trainer") -> None:
        self.monitored.expect_evaluations(trainer)
        if trainer.store is None:
            raise UserError(
                f"{_KEY}.metric={self.monitored.metric}: no run_dir was given, so there is nowhere to save to"
            )
        gone = set(dict(self._improvements)) - {*trainer.store.all_steps(), trainer.step}
        if (best := self.step) in gone:
            say(f"note: no checkpoint of step {best}, the best by {self.monitored.metric}: it counts no more")
        self._forget(gone)
        self._link(trainer)

    def on_evaluate(self, trainer: "Trainer", result: Record) -> None:
        value = self.monitored.value(result)
        self._forget_failed(trainer)
        if trainer.step > 0 and self.monitored.is_better(value, self.best):
            self._improvements = [*self._improvements, (trainer.step, value)]
            self._to_be_saved.add(trainer.step)
            trainer.control.save = True

    def on_save(self, trainer: "Trainer", checkpoint: Path) -> None:
        saved = int(checkpoint.name.rpartition("-")[2])
        self._to_be_saved.discard(saved)
        self._forget_failed(trainer)
        if saved in dict(self._improvements):
            self._link(trainer)

    def keeps(self, steps: Collection[int]) -> set[int]:
        """The best of those that are saved: the one before it stays until then."""
        saved = [step for step, _ in self._improvements if step in steps]
        return set(saved[-1:])

    def _forget_failed(self, trainer: "Trainer") -> None:
        if trainer.store is not None and self._to_be_saved:
            coming = {trainer.step, trainer.saved_at}
            self._forget(self._to_be_saved - coming - set(trainer.store.steps()))

    def _forget(self, steps: Collection[int]) -> None:
        """What has no checkpoint is none to be better than."""
        self._to_be_saved -= set(steps)
        self._improvements = [each for each in self._improvements if each[0] not in steps]

    def _link(self, trainer: "Trainer") -> None:
        """Have this callback's link lead to the best checkpoint that is there, or be gone where none is."""
        assert trainer.store is not None
        if not trainer.world.is_first:
            return
        alike = [each for each in trainer.callbacks if isinstance(each, BestCheckpoint)]
        metric = self.monitored.metric.replace("/", "-")
        link = trainer.store.directory / (LINK if self in alike[:1] else f"{LINK}-{metric}")
        for step in self.keeps(trainer.store.steps()):
            _link(link, trainer.store.path(step))
            return
        if link.is_symlink() and not link.exists():
            link.unlink()

    def state_dict(self) -> dict[str, Any]:
        """The best value, and its step; those that it takes the place of once it is saved."""
        cfg = {"metric": self.monitored.metric, "mode": self.monitored.mode}
        return {**cfg, "improvements": [list(each) for each in self._improvements]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from the best so far, unless another number decides now."""
        if state["metric"] != self.monitored.metric or state.get("mode", self.cfg.mode) != self.cfg.mode:
            return
        self._improvements = []
        if "improvements" in state:
            self._improvements = [(step, value) for step, value in state["improvements"]]
        elif state["step"] is not None:  # of a first version
            self._improvements = [(state["step"], state["best"])]
        self._to_be_saved = set()


def _link(link: Path, checkpoint: Path) -> None:
    """Lead `link` to `checkpoint`, at once and without a moment in which it leads nowhere."""
    new = link.with_name(f".{link.name}-new")
    try:
        new.unlink(missing_ok=True)
        new.symlink_to(checkpoint.name, target_is_directory=True)
        os.replace(new, link)
    except OSError as error:
        say(f"note: {link} does not lead to {checkpoint.name} ({error.strerror})")
