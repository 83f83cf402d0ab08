"""The learning rate as a pure function of the step: nothing to save, nothing to get out of step."""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from tputrain.config_checks import expect, expect_at_least, expect_share
from tputrain.kinds import Family

LearningRate = Callable[[int], float] | LRScheduler
"""A function of the step (from 0), or one of PyTorch's schedulers, stepped after every optimizer step."""


@dataclass(frozen=True)
class ScheduleConfig(Family, group="schedule", by="name"):
    """Linear warm-up to the optimizer's learning rate, then `name`'s way on."""

    name: str = "cosine"
    """cosine, linear, constant, or wsd."""
    warmup_steps: int = 0
    """Steps until the full learning rate."""
    steps: int | None = None
    """Length of the schedule; None: trainer.steps, so that a run made longer decays over its new length."""

    def __post_init__(self) -> None:
        expect_at_least("schedule.warmup_steps", self.warmup_steps, 0)
        expect_at_least("schedule.steps", self.steps, 1)
        expect(
            self.steps is None or self.warmup_steps <= self.steps,
            "schedule.warmup_steps",
            self.warmup_steps,
            f"at most schedule.steps={self.steps}",
        )

    def factor(self, step: int, total_steps: int) -> float:
        """What step `step` (from 0) of `total_steps` multiplies the learning rate by, from 0 to 1.

        The first step of a warm-up already moves (1 / warmup_steps), and the last step of a decay is
        `final_fraction`.
        """
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        return self._after_warmup(step, self.steps or total_steps)

    def _after_warmup(self, step: int, length: int) -> float:
        raise NotImplementedError


@dataclass(frozen=True)
class ConstantConfig(ScheduleConfig, names=("constant",)):
    """The full learning rate to the end."""

    name: str = "constant"

    def _after_warmup(self, step: int, length: int) -> float:
        return 1.0


@dataclass(frozen=True)
class LinearConfig(ScheduleConfig, names=("linear",)):
    """A straight line down."""

    name: str = "linear"
    final_fraction: float = 0.1
    """What is left of the learning rate at the end."""

    def __post_init__(self) -> None:
        super().__post_init__()
        expect_share("schedule.final_fraction", self.final_fraction)

    def _after_warmup(self, step: int, length: int) -> float:
        start = self._start(length)
        progress = max(0.0, min(1.0, (step - start) / max(1, length - 1 - start)))
        return self.final_fraction + (1.0 - self.final_fraction) * self._down(progress)

    def _start(self, length: int) -> int:
        """The step at which the way down begins."""
        return self.warmup_steps

    def _down(self, progress: float) -> float:
        return 1.0 - progress


@dataclass(frozen=True)
class CosineConfig(LinearConfig, names=("cosine",)):
    """Half a cosine down."""

    name: str = "cosine"

    def _down(self, progress: float) -> float:
        return 0.5 * (1.0 + math.cos(math.pi * progress))


@dataclass(frozen=True)
class WarmupStableDecayConfig(LinearConfig, names=("wsd",)):
    """Warm-up, stable, decay: constant, then a straight line down at the end."""

    name: str = "wsd"
    decay_fraction: float = 0.2
    """The last share of the schedule's steps, in which the learning rate comes down."""

    def __post_init__(self) -> None:
        super().__post_init__()
        expect_share("schedule.decay_fraction", self.decay_fraction)

    def _start(self, length: int) -> int:
        return max(self.warmup_steps, length - 1 - round(self.decay_fraction * length))


def jump(
    step: int, before: Mapping[str, Any], now: ScheduleConfig, rate: float, total_steps: int
) -> str | None:
    """What to say where a run goes on after `step` steps with another length, and so another learning rate.

    `before`: the configuration that it has come so far with; `rate` and `total_steps`: those that hold now.
    None where the rate goes on as it would have, or where more than the length was changed, on purpose.
    """
    old_steps, old_rate = before["trainer"]["steps"], before["optim"]["learning_rate"]
    same_schedule = all(before["schedule"].get(key) == value for key, value in asdict(now).items())
    if old_steps == total_steps or step >= total_steps or not same_schedule or old_rate != rate:
        return None
    due, comes = (rate * now.factor(step, steps) for steps in (old_steps, total_steps))
    if abs(comes - due) <= 0.01 * due:
        return None
    last = rate * now.factor(step - 1, old_steps)
    return (
        f"note: the learning rate jumps from {last:.3g} to {comes:.3g}: schedule.name={now.name} spans "
        f"trainer.steps={total_steps} now, {old_steps} before; schedule.steps={old_steps} goes on at "
        f"{due:.3g} instead, without a jump"
    )
