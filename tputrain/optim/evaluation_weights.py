"""The weights that a run is judged by, saved and used with, where it trains at others."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tputrain import device as devices
from tputrain.optim.ema import Ema
from tputrain.optim.schedule_free import changes_weights_to_evaluate


class EvaluationWeights:
    """Puts the averages of an EMA, or a schedule-free optimizer's, in the model's place for a while.

    Without either, nothing happens, at no cost.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        ema_decay: float | None,
        device: torch.device,
    ):
        trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
        self._trained = {name: p for name, p in model.named_parameters() if id(p) in trained}
        self._optimizer: Any = optimizer if changes_weights_to_evaluate(optimizer) else None
        self.ema = None if ema_decay is None else Ema(list(self._trained.values()), optimizer, ema_decay)
        self._device = device

    def begin(self, step: int) -> None:
        """Averages begin with the model's weights as they are now, after `step` steps."""
        if self.ema is not None:
            self.ema.begin(step)

    @property
    def averages(self) -> list[Tensor]:
        """Those of an EMA, one a trained parameter; empty without one."""
        return [] if self.ema is None else self.ema.averages

    @contextmanager
    def in_place(self) -> Iterator[dict[str, Tensor]]:
        """The model holds the weights to evaluate and save; yields those that are trained, where they differ.

        Afterwards it holds, to the bit, what it held before.
        """
        has_averages = self.ema is not None and bool(self.ema.averages)
        if not has_averages and self._optimizer is None:
            yield {}
            return
        kept = {name: parameter.detach().clone() for name, parameter in self._trained.items()}
        self._put_averages()
        devices.flush(self._device)  # nothing of this is to be part of a step's program
        try:
            yield kept
        finally:
            self._put_back(kept)
            devices.flush(self._device)

    @torch.no_grad()
    def _put_averages(self) -> None:
        if self._optimizer is not None:
            self._optimizer.eval()
        if self.ema is not None:
            for parameter, average in zip(self.ema.parameters, self.ema.averages):
                parameter.copy_(average)

    @torch.no_grad()
    def _put_back(self, kept: dict[str, Tensor]) -> None:
        if self._optimizer is not None:
            self._optimizer.train()  # its own way back rounds, hence the copies
        for name, values in kept.items():
            self._trained[name].copy_(values)
