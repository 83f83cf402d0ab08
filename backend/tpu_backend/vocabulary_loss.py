"""`linear_cross_entropy`: a linear layer and the cross-entropy of its results, without all of its logits."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

from tpu_backend.untraced import untraced

_SCHEMA = (
    "linear_cross_entropy(Tensor self, Tensor linear_weight, Tensor target, Tensor? linear_bias, "
    "Tensor? token_weight, int ignore_index, bool[3] wanted) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_SCHEMA_OF_GRADIENT = "loss_gradient(Tensor self, Tensor factor, ScalarType dtype) -> Tensor"


@cache
def register() -> Library:
    """Define the operators behind it, for the life of the process.  Idempotent."""
    library = Library("tpu", "FRAGMENT")
    library.define(_SCHEMA)
    library.impl("linear_cross_entropy", untraced(_infer), "Meta")
    library.define(_SCHEMA_OF_GRADIENT)
    library.impl("loss_gradient", untraced(_infer_gradient), "Meta")
    return library


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    token_weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
) -> Tensor:
    """The cross-entropy (nats) of ``linear(input, linear_weight, linear_bias)``, a scalar on the tpu device.

    `input` (..., E), `linear_weight` (V, E) and `linear_bias` (V) are of one dtype of floats; `target` (...),
    int64, are classes, or `ignore_index`. `token_weight` (...) weighs the tokens; no gradient flows to it.
    `reduction`: "mean", over the weights of those that are not ignored, or "sum". The result is float32 for
    16-bit inputs, which multiply as they are; under autocast they are cast as for `linear`.

    The gradients are computed in the forward pass, where they are asked for. They can be differentiated no
    further: NotImplementedError. Raises ValueError or TypeError for what does not fit.
    """
    named = {"input": input, "linear_weight": linear_weight, "linear_bias": linear_bias}
    floats = {name: each for name, each in named.items() if each is not None}
    kind = input.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        floats = {
            name: each.to(dtype) if each.dtype is not torch.float64 else each for name, each in floats.items()
        }
    _check(floats, target, token_weight, reduction)
    is_recorded = torch.is_grad_enabled()
    wanted = [
        is_recorded and name in floats and floats[name].requires_grad
        for name in ("input", "linear_weight", "linear_bias")
    ]
    loss: Tensor = _LinearCrossEntropy.apply(
        floats["input"].reshape(-1, input.shape[-1]),
        floats["linear_weight"],
        target.reshape(-1),
        floats.get("linear_bias"),
        None if token_weight is None else token_weight.detach().reshape(-1),
        ignore_index,
        wanted,
        reduction == "mean",
    )
    return loss


def _check(floats: dict[str, Tensor], target: Tensor, token_weight: Tensor | None, reduction: str) -> None:
    shapes = {name: tuple(each.shape) for name, each in floats.items()}
    given = floats["input"].shape
    if reduction not in ("mean", "sum"):
        raise ValueError(
            f"linear_cross_entropy: reduction={reduction!r}: expected 'mean' or 'sum'; "
            "token_weight weighs tokens"
        )
    if len({each.dtype for each in floats.values()}) > 1 or not floats["input"].is_floating_point():
        dtypes = ", ".join(f"{name} of {each.dtype}" for name, each in floats.items())
        raise TypeError(f"linear_cross_entropy: expected one dtype of floats, got {dtypes}")
    if len(given) < 1 or floats["linear_weight"].shape[1:] != given[-1:]:
        raise ValueError(f"linear_cross_entropy: expected (..., E) and (V, E), got {shapes}")
    if "linear_bias" in floats and floats["linear_bias"].shape != floats["linear_weight"].shape[:1]:
        raise ValueError(f"linear_cross_entropy: expected a linear_bias of (V,), got {shapes}")
    if target.dtype is not torch.int64 or target.shape != given[:-1]:
        raise ValueError(
            f"linear_cross_entropy: expected an int64 target {tuple(given[:-1])}, "
            f"got {target.dtype} {tuple(target.shape)}"
        )
    if token_weight is not None and token_weight.shape != target.shape:
        raise ValueError(
            f"linear_cross_entropy: expected a token_weight {tuple(target.shape)}, "
            f"got {tuple(token_weight.shape)}"
        )


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        linear_weight: Tensor,
        target: Tensor,
        linear_bias: Tensor | None,
        token_weight: Tensor | None,
        ignore_index: int,
        wanted: list[bool],
        is_mean: bool,
    ) -> Tensor:
        loss, total, *gradients = torch.ops.tpu.linear_cross_entropy(
            hidden, linear_weight, target, linear_bias, token_weight, ignore_index, wanted
        )
        ctx.is_mean, ctx.dtype, ctx.wanted = is_mean, hidden.dtype, wanted
        ctx.save_for_backward(total, *gradients)
        return loss / total if is_mean else loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise NotImplementedError(
                "linear_cross_entropy has no second derivatives: differentiate without create_graph, or make "
                "the loss of linear and cross_entropy"
            )
        total, *gradients = ctx.saved_tensors
        if ctx.is_mean:
            grad = torch.where(total == 0, 0, grad / total)  # no token counts: nothing has a gradient
        hidden, weight, bias = (
            torch.ops.tpu.loss_gradient(each, grad, ctx.dtype) if is_wanted else None
            for each, is_wanted in zip(gradients, ctx.wanted, strict=True)
        )
        return hidden, weight, None, bias, None, None, None, None


def _infer_gradient(self: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(self, dtype=dtype)


def _infer(
    self: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    token_weight: Tensor | None,
    ignore_index: int,
    wanted: list[bool],
) -> tuple[Tensor | None, ...]:
    dtype = torch.promote_types(self.dtype, torch.float32)

    def empty(shape: torch.Size, is_wanted: bool = True) -> Tensor:
        return self.new_empty(shape if is_wanted else (0,), dtype=dtype)

    scalar = torch.Size(())
    shapes = self.shape, linear_weight.shape, linear_weight.shape[:1]
    return empty(scalar), empty(scalar), *(empty(*each) for each in zip(shapes, wanted, strict=True))
