"""Where a run is."""

import math
import time
from typing import Any

from tputrain import batches as batch_of
from tputrain.loggers.logger import Record
from tputrain.loop.next_batches import StepBatches


class Position:
    """How far a run has come; a checkpoint holds all of it. A Trainer is one."""

    step: int
    """Optimizer steps done."""
    num_done: int
    """Tokens (of text) or samples trained on."""
    unit: str
    """Of `num_done`: tokens or samples."""
    epoch: int
    """That of the step under way or the last one, from 0; -1: none has begun, or the loader knows none."""
    epochs_done: float | None
    """None: the loader does not tell."""
    seconds: float
    """Of training, in all processes."""
    saved_seconds: float
    """`seconds` at the last checkpoint; 0.0: there is none."""
    best: Record | None
    """The evaluation with the lowest finite loss: its `step`, `loss` and what else it measured. By another
    metric: the `step` and `best` of a BestCheckpoint."""
    evaluated_at: int | None
    """The step of the last evaluation that was not broken off."""

    def __init__(self) -> None:
        self.step, self.num_done, self.unit = 0, 0, "samples"
        self.epoch, self.epochs_done, self.seconds, self.saved_seconds = -1, None, 0.0, 0.0
        self.best = self.evaluated_at = None


class Clock:
    """Counts the seconds of training into a position."""

    def __init__(self, position: Position):
        self._position, self._read_at = position, 0.0

    def start(self) -> None:
        """Training begins, or goes on."""
        self._read_at = time.monotonic()

    def read(self) -> None:
        """What has passed since the last time counts."""
        now = time.monotonic()
        self._position.seconds, self._read_at = self._position.seconds + now - self._read_at, now


def count(position: Position, batches: StepBatches) -> None:
    """A step on these was dispatched."""
    position.unit = "tokens" if batch_of.is_text(batches.host[0]) else "samples"
    position.step += 1
    position.num_done += sum(batch_of.size(batch) for batch in batches.host)
    position.epochs_done = batches.epochs


def state_of(position: Position) -> dict[str, Any]:
    """All of it, as JSON."""
    return {
        "step": position.step,
        position.unit: position.num_done,
        "unit": position.unit,
        "best": position.best,
        "evaluated_at": position.evaluated_at,
        "epoch": position.epoch,
        "epochs_done": position.epochs_done,
        "seconds": position.seconds,
    }


def restore(position: Position, state: dict[str, Any]) -> None:
    """Take what `state_of` gave, or an earlier version, which had no epochs and seconds."""
    position.step, position.unit = state["step"], state["unit"]
    position.num_done = state[position.unit]
    position.epoch, position.epochs_done = state.get("epoch", -1), state.get("epochs_done")
    position.seconds = position.saved_seconds = state.get("seconds", 0.0)
    position.best, position.evaluated_at = state["best"], state["evaluated_at"]
    if position.best is not None and not math.isfinite(position.best["loss"]):
        position.best = None  # earlier versions took a first evaluation of NaN for the best
