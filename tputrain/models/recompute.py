"""Activation checkpointing: the backward pass computes a layer again instead of keeping what it computed."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tputrain.device import computed_again, computed_before


def recomputed(layer: nn.Module, hidden: Tensor, *others: Any) -> Tensor:
    """`layer(hidden, *others)`, of which only `hidden` is kept for the backward pass.

    The layer must not draw random numbers, and no gradient flows to `others` (Chen et al., 2016).
    torch.utils.checkpoint would not do: on a device that compiles the whole step, both computations of the
    layer are one unless the second is kept apart from the first.
    """
    if not torch.is_grad_enabled():
        return layer(hidden, *others)
    if torch.compiler.is_compiling():  # which knows checkpoint(), and keeps both computations apart by itself
        return checkpoint(layer, hidden, *others, use_reentrant=False)
    trainable = [parameter for parameter in layer.parameters() if parameter.requires_grad]
    if any(hasattr(parameter, "device_mesh") for parameter in trainable):  # made whole only when it is called
        return recomputed_call(layer, hidden, *others)
    return _Recomputed.apply(lambda values: layer(values, *others), hidden, *trainable)


def recomputed_call(function: Callable[..., Any], *inputs: Any) -> Any:
    """`function(*inputs)`, computed again in the backward pass, with the same random numbers: what
    transformers asks for of each of its layers, whose outputs and further inputs may be anything.
    """
    calls = 0

    def run(*values: Any) -> Any:
        nonlocal calls
        calls += 1
        return function(*(values if calls == 1 else _kept_apart(values)))

    return checkpoint(run, *inputs, use_reentrant=False)


def _kept_apart(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """`values` with the hidden states, the first of them, as `computed_again` gives them."""
    # Detached: only what the layer keeps for its backward pass is wanted of this computation.
    (hidden,) = computed_again(values[0].detach())
    return hidden.requires_grad_(values[0].requires_grad), *values[1:]


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Callable[[Tensor], Tensor], hidden: Tensor, *parameters: Tensor) -> Tensor:
        kind = hidden.device.type
        ctx.run = run
        ctx.autocast = {
            "device_type": kind,
            "dtype": torch.get_autocast_dtype(kind),
            "enabled": torch.is_autocast_enabled(kind),
        }
        ctx.save_for_backward(hidden, *parameters)
        return run(hidden)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, *parameters = ctx.saved_tensors
        hidden, grad = computed_again(hidden, grad)
        hidden = hidden.detach().requires_grad_()
        with torch.enable_grad(), torch.autocast(**ctx.autocast):
            output = ctx.run(hidden)
        of_hidden, *of_parameters = torch.autograd.grad(
            output, [hidden, *parameters], grad, allow_unused=True
        )
        # Of one layer at a time what a gradient is computed from is in memory.
        of_hidden = computed_before(of_hidden, *(each for each in of_parameters if each is not None))
        return (None, of_hidden, *of_parameters)
