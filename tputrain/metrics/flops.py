"""How many floating-point operations the model itself asks for: the numerator of MFU.

Counted, not estimated: forward and backward are run once for each shape of batch on PyTorch's meta device,
which has shapes but no values, under PyTorch's own counter. It counts matrix products, convolutions and
attention, 2 for each multiply-add, and nothing else. Attention counts in full, also where half of it is
masked. A backward pass counts at most twice its forward pass, so that what activation checkpointing computes
again is not counted; frozen parameters, which need less, count less.
"""

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode

from tputrain import batches as batch_of
from tputrain.batches import Batch
from tputrain.errors import first_line
from tputrain.loss import LossFunction, loss_of

_META = torch.device("meta")


class FlopCount:
    """FLOPs of training on a batch, counted when its shapes are first seen."""

    def __init__(self, model: nn.Module, loss_fn: LossFunction | None, keeps_shape: bool = False):
        """`keeps_shape`: count for the model as it is now, also once it is laid out over ranks."""
        self.model, self.loss_fn = _shape_of(model) if keeps_shape else model, loss_fn
        self.problem: str | None = None
        """Why this model cannot be counted, in one line."""
        self._known: dict[Any, int] = {}

    def of_step(self, batches: Sequence[Batch]) -> int | None:
        """FLOPs of a step on these micro-batches (on the host); None where they cannot be counted."""
        total = 0
        for batch in batches:
            key = batch_of.form(batch)
            if key not in self._known and self.problem is None:
                self._count(key, batch)
            if self.problem is not None:
                return None
            total += self._known[key]
        return total

    def _count(self, key: Any, batch: Batch) -> None:
        # Anything may be in a model: reading a value, a tensor that is no buffer. It trains all the same.
        try:
            self._known[key] = count_flops(self.model, batch, self.loss_fn)
        except Exception as error:
            self.problem = first_line(error)


def _shape_of(model: nn.Module) -> nn.Module:
    """A copy without values."""
    tensors = [*model.parameters(), *model.buffers()]
    without_values: dict[int, Any] = {}
    for tensor in tensors:
        empty = torch.empty_like(tensor, device=_META)
        if isinstance(tensor, nn.Parameter):
            empty = nn.Parameter(empty, tensor.requires_grad)
        without_values[id(tensor)] = empty
    return deepcopy(model, without_values)


def count_flops(model: nn.Module, batch: Batch, loss_fn: LossFunction | None = None) -> int:
    """FLOPs of one forward and backward pass of `model` on `batch`. Nothing is computed or drawn."""
    one_pass = _Pass(model, loss_fn)
    tensors = dict(one_pass.named_parameters()) | dict(one_pass.named_buffers())
    state = {
        name: torch.empty_like(tensor, device=_META, requires_grad=tensor.requires_grad)
        for name, tensor in tensors.items()
    }
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        forward, backward = functional_call(one_pass, state, (batch_of.to_device(batch, _META),))
    return forward + min(backward, 2 * forward)


class _Pass(nn.Module):
    """Forward and backward as one call: a checkpointed module runs again in the backward pass."""

    def __init__(self, model: nn.Module, loss_fn: LossFunction | None):
        super().__init__()
        self.model, self.loss_fn = model, loss_fn

    def forward(self, batch: Batch) -> tuple[int, int]:
        with FlopCounterMode(display=False) as forward:
            output = batch_of.call(self.model, batch)
            loss = loss_of(output, batch_of.target_of(batch), self.loss_fn)
        with FlopCounterMode(display=False) as backward:
            if loss.requires_grad:
                loss.backward()
        return forward.get_total_flops(), backward.get_total_flops()
