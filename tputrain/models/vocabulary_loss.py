"""The loss of a linear head over a vocabulary, which the tpu device computes in blocks of tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from tputrain import device as devices
from tputrain.batches import IGNORED_LABEL

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

MANY_LOGITS = 2**24
"""From here on a model's logits are not made whole: 64 MiB of float32."""


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    token_weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = IGNORED_LABEL,
) -> Tensor:
    """The cross-entropy (nats) of `linear(input, linear_weight, linear_bias)` and `target`, a scalar.

    `input` (..., E), `linear_weight` (V, E) and `linear_bias` (V) are of one dtype of floats; `target` (...),
    int64, are classes, or `ignore_index`. `token_weight` (...) weighs the tokens; no gradient flows to it.
    `reduction`: "mean", over the weights of those that are not ignored, or "sum". The loss of 16-bit inputs
    is float32; under autocast inputs are cast as those of `linear`.

    On the tpu device it is one operation, which computes its gradients with the loss: logits of a block of
    tokens alone are in memory. It cannot be differentiated twice. Elsewhere it is made of PyTorch's own.
    Raises ValueError or TypeError for what does not fit.
    """
    options = {
        "linear_bias": linear_bias,
        "token_weight": token_weight,
        "reduction": reduction,
        "ignore_index": ignore_index,
    }
    if input.device.type == "tpu":
        return devices.linear_cross_entropy()(input, linear_weight, target, **options)
    if reduction not in ("mean", "sum"):
        raise ValueError(f"linear_cross_entropy: reduction={reduction!r}: expected 'mean' or 'sum'")
    for name, each in (("target", target), ("token_weight", token_weight)):
        if each is not None and each.shape != input.shape[:-1]:
            raise ValueError(
                f"linear_cross_entropy: expected a {name} {tuple(input.shape[:-1])}, got {tuple(each.shape)}"
            )
    logits = F.linear(input, linear_weight, linear_bias).reshape(-1, linear_weight.shape[0])
    wide = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
    target = target.flatten()
    if token_weight is None:
        return F.cross_entropy(wide, target, reduction=reduction, ignore_index=ignore_index)
    losses = F.cross_entropy(wide, target, reduction="none", ignore_index=ignore_index)
    weights = torch.where(target == ignore_index, 0, token_weight.detach().flatten().to(losses.dtype))
    total = (losses * weights).sum()
    return total / weights.sum() if reduction == "mean" else total


class VocabularyHead(nn.Linear):
    """A linear head over a vocabulary: logits (B, S, V), or with labels (B, S) their `vocabulary_loss`.

    It makes the loss in its forward pass, so that FSDP2 can divide it as a unit. In the unit of the whole
    model its gradient, one of the largest, would be whole to the end of the backward pass.
    """

    is_divided = False
    """Whether ranks that have the same tokens have a part of the classes each (tensor parallelism)."""

    def forward(self, input: Tensor, labels: Tensor | None = None) -> Tensor:
        if self.is_divided:
            return self._of_part(input, labels)
        if labels is None:
            return super().forward(input)
        return vocabulary_loss(input, self.weight, labels, self.bias)

    def _of_part(self, input: Tensor, labels: Tensor | None) -> Tensor:
        # Who trains without tensor parallelism need not import DTensor.
        from tputrain.models.divided_vocabulary import divided_logits, divided_loss

        weight, bias = cast("DTensor", self.weight), cast("DTensor | None", self.bias)
        if labels is None:
            return divided_logits(input, weight, bias)
        return divided_loss(input, weight, labels, bias)


def loss_of_head(head: nn.Module, hidden: Tensor, labels: Tensor, num_own_hooks: int = 0) -> Tensor | None:
    """The `vocabulary_loss` of a head that only multiplies. None: it does more, or somebody has a hook on it
    and wants its logits. `num_own_hooks`: forward hooks of the caller.
    """
    of_fsdp = int(hasattr(head, "unshard"))  # its method; to import its class takes a second
    is_heard = len(head._forward_hooks) > of_fsdp + num_own_hooks or len(head._forward_pre_hooks) > of_fsdp
    if is_heard or head._backward_hooks or head._backward_pre_hooks:
        return None
    if isinstance(head, VocabularyHead):
        loss: Tensor = head(hidden, labels)
        return loss
    return vocabulary_loss(hidden, head.weight, labels, head.bias) if type(head) is nn.Linear else None


def vocabulary_loss(hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None = None) -> Tensor:
    """The float32 mean cross-entropy, in nats, of a head (V, E) and hidden states (B, S, E) over the labels
    (B, S) that count. Its logits are whole where that takes little memory.
    """
    if pays(hidden, weight):
        return linear_cross_entropy(hidden, weight, labels, linear_bias=bias)
    return next_token_loss(F.linear(hidden, weight, bias), labels)


def next_token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """The float32 mean cross-entropy, in nats, of logits (B, S, V) over the labels (B, S) that count."""
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORED_LABEL)


def pays(hidden: Tensor, weight: Tensor) -> bool:
    """Whether the logits of these are better not made whole.

    DTensors' are made by rules of their own. A plan traces fewer rows than a run has: it takes all for many.
    """
    is_own = not (hasattr(hidden, "device_mesh") or hasattr(weight, "device_mesh"))
    is_large = hidden.numel() // hidden.shape[-1] * weight.shape[0] > MANY_LOGITS
    is_large |= isinstance(hidden, FakeTensor)
    return hidden.device.type == "tpu" and is_own and is_large
