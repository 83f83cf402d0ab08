"""Ends a run whose evaluations no longer get better."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tputrain.announce import say
from tputrain.callbacks.callback import Callback
from tputrain.callbacks.monitored import MODES, Monitored
from tputrain.config_checks import Settings, expect_at_least, expect_choice
from tputrain.loggers.logger import Record

if TYPE_CHECKING:
    from tputrain.trainer import Trainer

_KEY = "callbacks.early_stopping"


@dataclass(frozen=True)
class EarlyStoppingConfig(Settings):
    """When to give up."""

    patience: int | None = None
    """Evaluations in a row without a better one, after which the run ends; None: it never does."""
    metric: str = "loss"
    """The number that is watched, by its name in evaluations.jsonl."""
    mode: str = "min"
    """min: less is better; max: more is."""
    min_delta: float = 0.0
    """How much better counts as better."""

    def __post_init__(self) -> None:
        expect_at_least(f"{_KEY}.patience", self.patience, 1)
        expect_choice(f"{_KEY}.mode", self.mode, MODES)
        expect_at_least(f"{_KEY}.min_delta", self.min_delta, 0.0)


class EarlyStopping(Callback):
    """Asks for the end of the run after `patience` evaluations in a row that were not the best so far.

    The step that the run ends with is evaluated and saved like any last step. The count is in the checkpoint:
    a run that was stopped stays stopped when it is started again, until patience is raised.
    """

    def __init__(self, patience: int, metric: str = "loss", mode: str = "min", min_delta: float = 0.0):
        self.cfg = EarlyStoppingConfig(patience, metric, mode, min_delta)
        self.patience = patience
        self.monitored = Monitored(f"{_KEY}.metric", metric, mode, min_delta)
        self.state_key = metric
        self.best: float | None = None
        self.num_waited = 0
        """Evaluations since the best one."""

    def on_fit_start(self, trainer: "Trainer") -> None:
        self.monitored.expect_evaluations(trainer)
        self._stop_if_waited_long_enough(trainer)

    def on_evaluate(self, trainer: "Trainer", result: Record) -> None:
        value = self.monitored.value(result)
        if self.monitored.is_better(value, self.best):
            self.best, self.num_waited = value, 0
        else:
            self.num_waited += 1
        self._stop_if_waited_long_enough(trainer)

    def _stop_if_waited_long_enough(self, trainer: "Trainer") -> None:
        if self.num_waited < self.patience:
            return
        trainer.control.stop = True
        best = "none was a number" if self.best is None else f"the best was {self.best:.4f}"
        say(
            f"stopped early at step {trainer.step}: {self.num_waited} evaluations without a better "
            f"{self.monitored.metric} ({best}); raise {_KEY}.patience={self.patience} to go on"
        )

    def state_dict(self) -> dict[str, Any]:
        """The best value so far, and the evaluations since."""
        return {"metric": self.monitored.metric, "best": self.best, "num_waited": self.num_waited}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on counting, unless another number is watched now."""
        if state["metric"] == self.monitored.metric:
            self.best, self.num_waited = state["best"], state["num_waited"]
