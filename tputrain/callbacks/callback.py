"""What a callback is, and how it asks the training loop for something."""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from tputrain.loggers.logger import Record

if TYPE_CHECKING:
    from tputrain.trainer import Trainer


@dataclass
class Control:
    """Requests to the training loop (`trainer.control`), granted after the step in which they are made."""

    evaluate: bool = False
    save: bool = False
    stop: bool = False


class Callback:
    """Override what you need. Hooks run in the order in which the callbacks were given.

    A hook may read `trainer` (step, epoch, num_done, model, optimizer, cfg), set `trainer.control` and call
    `trainer.log`. The hooks of a step must not read a tensor of the model: that would stop the device at
    every step; `on_log` and `on_evaluate` bring the numbers. A callback with `state_dict()` and
    `load_state_dict(state)` (plain JSON) is kept in the checkpoint.
    """

    state_key: str = ""
    """Tells callbacks of one class apart in a checkpoint, whatever their order."""

    def on_fit_start(self, trainer: "Trainer") -> None:
        """After a resume, before the first step."""

    def on_epoch_start(self, trainer: "Trainer", epoch: int) -> None:
        """The next step is the first with batches of epoch `epoch` (from 0); of loaders that know epochs."""

    def on_step_start(self, trainer: "Trainer") -> None:
        """Step `trainer.step + 1` begins; its batches are there."""

    def on_before_backward(self, trainer: "Trainer", loss: Tensor) -> None:
        """`loss` of a micro-batch, times its share of the step, is about to be differentiated."""

    def on_after_backward(self, trainer: "Trainer") -> None:
        """A micro-batch has added its gradients, which are not clipped."""

    def on_before_optimizer_step(self, trainer: "Trainer") -> None:
        """The gradients of the step are complete and clipped."""

    def on_step_end(self, trainer: "Trainer") -> None:
        """A step was dispatched; `trainer.step` counts it."""

    def on_log(self, trainer: "Trainer", records: list[Record]) -> None:
        """Values were read: one record for every step since the last time."""

    def on_evaluate(self, trainer: "Trainer", result: Record) -> None:
        """An evaluation ended; `result` holds at least step, loss and `loss_hex`, the loss to the last bit as
        text. Random numbers that are drawn in here change nothing in training.
        """

    def on_save(self, trainer: "Trainer", checkpoint: Path) -> None:
        """A checkpoint is complete."""

    def on_exception(self, trainer: "Trainer", error: BaseException) -> None:
        """`fit` is left by `error`. Not by a signal, after which the run has ended well."""

    def on_fit_end(self, trainer: "Trainer") -> None:
        """Training ends: at the last step, by request, or by a signal."""

    def keeps(self, steps: Collection[int]) -> set[int]:
        """Of the steps that have a checkpoint, those to keep whatever `checkpoint.keep_last` says.

        Asked by the thread that has just written one: read attributes only.
        """
        return set()

    def close(self) -> None:
        """`fit` is left, well or by an error: give back what the callback holds. Must not fail."""


def state_of(callbacks: list[Callback]) -> list[dict[str, Any]]:
    """Kind, key and state of each callback that has one, in order."""
    return [
        {"kind": type(callback).__name__, "key": callback.state_key, "state": callback.state_dict()}
        for callback in callbacks
        if hasattr(callback, "state_dict")
    ]


def load_state_of(callbacks: list[Callback], states: list[dict[str, Any]]) -> list[str]:
    """Give each callback the state saved for its kind and key, or what is left of its kind, in order.

    Returns the kinds of states left over.
    """
    left = list(states)
    waiting = [callback for callback in callbacks if hasattr(callback, "load_state_dict")]
    for names in (("kind", "key"), ("kind",)):
        for callback in list(waiting):
            own = {"kind": type(callback).__name__, "key": callback.state_key}
            fitting = (saved for saved in left if all(saved.get(name) == own[name] for name in names))
            if (found := next(fitting, None)) is not None:
                callback.load_state_dict(found["state"])
                left.remove(found)
                waiting.remove(callback)
    return [saved["kind"] for saved in left]
