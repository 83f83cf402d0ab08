"""The learning rate of each step, from wherever it comes."""

import sys
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from tputrain.optim.config import OptimConfig
from tputrain.optim.numbers import as_numbers, like
from tputrain.optim.optimizer import other_rates, set_learning_rate
from tputrain.optim.schedule import LearningRate, ScheduleConfig


class LearningRates:
    """Sets an optimizer's learning rate: by the configuration, by a function of the step, or not at all where
    a scheduler of PyTorch's, or the optimizer itself, keeps it.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        scheduler: LearningRate | None,
        is_by_config: bool,
        optim: OptimConfig,
        schedule: ScheduleConfig,
    ):
        self._optimizer, self.scheduler = optimizer, scheduler
        self._optim, self._schedule = optim, schedule
        self.is_by_config = is_by_config
        """Whether `optim` and `schedule` set it."""

    def set(self, step: int, total_steps: int | None) -> dict[str, float]:
        """Bring it to step `step` (from 0); returns it by name, with those of groups that have others.

        `total_steps`: None before the first step, where they are not known yet: a schedule begins alike.
        """
        if self.is_by_config:
            rate = self._optim.learning_rate * self._schedule.factor(step, total_steps or sys.maxsize)
            set_learning_rate(self._optimizer, rate)
        elif callable(self.scheduler):
            rate = float(self.scheduler(step))
            set_learning_rate(self._optimizer, rate)
        else:  # that of the first group
            rate = float(self._optimizer.param_groups[0]["lr"])
        return {"learning_rate": rate} | other_rates(self._optimizer)

    def after_step(self) -> None:
        """The optimizer has taken its step."""
        if isinstance(self.scheduler, LRScheduler):
            self.scheduler.step()

    def state(self) -> dict[str, Any] | None:
        """A scheduler's, for a checkpoint; of a learning rate that is a tensor, the number."""
        if not isinstance(self.scheduler, LRScheduler):
            return None
        return as_numbers(self.scheduler.state_dict())

    def restore(self, state: dict[str, Any] | None) -> None:
        """Take what `state` gave."""
        if isinstance(self.scheduler, LRScheduler) and state:
            self.scheduler.load_state_dict(like(state, self.scheduler.state_dict()))
