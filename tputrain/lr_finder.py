"""Which learning rate to take: a short sweep from far too low to far too high (Smith, 2017)."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import nn

from tputrain.callbacks.callback import Callback
from tputrain.callbacks.config import CallbacksConfig
from tputrain.config import RunConfig
from tputrain.errors import UserError
from tputrain.loggers.logger import Record
from tputrain.loop.step import TrainStep
from tputrain.loop.step_parts import StepParts
from tputrain.loss import LossFunction
from tputrain.lr_sweep import SweepConfig
from tputrain.trainer import Trainer

if TYPE_CHECKING:
    from numpy.typing import NDArray

_SMOOTHING = 0.8  # share of the past in the mean of losses
_DIVERGED = 1.5  # times the lowest loss: there is nothing more to learn from going on
_READ_EVERY = 10  # steps


@dataclass(frozen=True)
class Sweep:
    """The loss of each step at its learning rate, up to where it diverged."""

    rates: list[float]
    losses: list[float]

    @property
    def smoothed(self) -> "NDArray[np.float64]":
        """Running means of the losses, without the bias of a beginning."""
        means, mean = [], 0.0
        for step, loss in enumerate(self.losses):
            mean = _SMOOTHING * mean + (1.0 - _SMOOTHING) * loss
            means.append(mean / (1.0 - _SMOOTHING ** (step + 1)))
        return np.array(means)

    @property
    def at_lowest_loss(self) -> float:
        """The learning rate of the lowest loss: already too high to train with."""
        return self.rates[int(np.argmin(self.smoothed))]

    @property
    def suggested(self) -> float:
        """The learning rate at which the loss fell fastest, for a schedule to begin with.

        The slope over the logarithm of the rate is that of a line through a tenth of the steps. Raises
        UserError where the loss never fell.
        """
        smoothed, rates = self.smoothed, np.log(self.rates)
        width = max(5, len(rates) // 10)
        end = int(np.argmin(smoothed)) + 1
        slopes = [
            (float(np.polyfit(rates[start : start + width], smoothed[start : start + width], 1)[0]), start)
            for start in range(end - width + 1)
        ]
        if not slopes or min(slopes)[0] >= 0.0:
            raise UserError(
                "the loss never fell: expected it to, somewhere between --lowest and --highest; widen them, "
                "or look at the data"
            )
        return self.rates[min(slopes)[1] + width // 2]


def find_learning_rate(
    model: nn.Module,
    cfg: RunConfig,
    train_loader: Any,
    loss_fn: LossFunction | None = None,
    sweep: SweepConfig | None = None,
    step: Callable[[StepParts], TrainStep] = TrainStep,
) -> Sweep:
    """Train `model` with the optimizer of `cfg` through the learning rates of `sweep`.

    The model is of no use afterwards: give one that was made for this. Nothing is written or evaluated.
    """
    chosen = sweep or SweepConfig()
    seen = _Losses()
    trainer = Trainer(
        model,
        replace(
            cfg,
            run_dir=None,
            trainer=replace(
                cfg.trainer, steps=chosen.steps, duration=None, on_nonfinite="continue", spike_factor=None
            ),
            callbacks=CallbacksConfig(),
            log=replace(cfg.log, every=_READ_EVERY, tensorboard=False, wandb=type(cfg.log.wandb)()),
        ),
        train_loader=train_loader,
        loss_fn=loss_fn,
        lr_scheduler=chosen.rate,
        callbacks=[seen],
        step=step,
    )
    trainer.fit()
    return seen.sweep()


@dataclass
class _Losses(Callback):
    """Keeps the losses, and ends the sweep where they diverge."""

    records: list[Record] = field(default_factory=list)

    def on_log(self, trainer: Trainer, records: Sequence[Record]) -> None:
        self.records += records
        found = self.sweep()
        if len(found.losses) < len(self.records) or found.smoothed[-1] > _DIVERGED * found.smoothed.min():
            trainer.control.stop = True

    def sweep(self) -> Sweep:
        finite = len(self.records)
        for place, record in enumerate(self.records):
            if not math.isfinite(record["loss"]):
                finite = place
                break
        kept = self.records[:finite]
        if not kept:
            raise UserError("the loss of the first step is not finite: no learning rate mends that")
        return Sweep([record["learning_rate"] for record in kept], [record["loss"] for record in kept])
