"""An optimizer step that is taken back on the device where it would spoil the weights."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from tputrain.checkpoint.rows import local_part


class WithheldUpdate:
    """Remembers a model and its optimizer before a step, and puts them back where the step turns out bad: its
    loss or gradient norm is no number, or the norm is above a limit.

    Decided by a `where` on the device: the host does not learn of it here. Parameters, buffers, the
    optimizer's tensors and averages of the weights are put back; step counts that the optimizer keeps on the
    host go on, for whether to count is not known there. In the program of a step XLA makes no copies for
    this; on other devices it is one more copy of the weights and the optimizer's state.
    """

    @torch.no_grad()
    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        averages: Sequence[Tensor] = (),
        largest_norm: float = math.inf,
    ):
        """To be made before the forward pass, which may change buffers."""
        self.optimizer, self.largest_norm = optimizer, largest_norm
        # Of what ranks have parts of each puts its own back: loss and norm are the same on all.
        changed = map(local_part, [*_changed_by_a_step(model, optimizer), *averages])
        self._kept = [(tensor, tensor.clone()) for tensor in changed]
        self._is_decided = False

    @contextmanager
    def where_bad(self, loss: Tensor, grad_norm: Tensor) -> Iterator[None]:
        """The optimizer's step in here is taken back where that is so of these two (scalars)."""
        # A hook of the optimizer's own runs before the tpu device's, which ends the program of a step.
        hook = self.optimizer.register_step_post_hook(lambda *_: self._take_back_where_bad(loss, grad_norm))
        try:
            yield
        finally:
            hook.remove()
        if not self._is_decided:  # the optimizer of a step of one's own may be another one
            self._take_back_where_bad(loss, grad_norm)

    @torch.no_grad()
    def _take_back_where_bad(self, loss: Tensor, grad_norm: Tensor) -> None:
        self._is_decided = True
        is_good = torch.isfinite(loss.detach()) & torch.isfinite(grad_norm)
        is_good &= grad_norm <= self.largest_norm
        for tensor, before in self._kept:
            tensor.copy_(torch.where(is_good, tensor, before))


def _changed_by_a_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    devices = {parameter.device for parameter in model.parameters()}
    # In an order that does not tell whether the state was made or loaded: else these would be two programs.
    trained = (parameter for group in optimizer.param_groups for parameter in group["params"])
    found = (optimizer.state.get(each, {}) for each in dict.fromkeys([*trained, *optimizer.state]))
    states = (state[key] for state in found for key in sorted(state, key=str))
    tensors = {
        id(value): value
        for value in (*model.parameters(), *model.buffers(), *states)
        if isinstance(value, Tensor) and value.device in devices
    }
    yield from tensors.values()
