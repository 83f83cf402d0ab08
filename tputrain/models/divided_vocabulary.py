"""A head whose weight is divided by classes among ranks that have the same tokens (tensor parallelism).

Each rank makes the logits of its own classes. What the loss needs of others is two numbers a token, so that
no rank has all logits (Megatron-LM, Shoeybi et al. 2019).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from tputrain.batches import IGNORED_LABEL


def divided_logits(hidden: Tensor, weight: DTensor, bias: DTensor | None = None) -> Tensor:
    """All logits (..., V), on each rank, of hidden states (..., E) and a weight (V, E), divided by rows."""
    own = _own_logits(hidden, weight, bias)
    layout = [Shard(own.dim() - 1)]
    return DTensor.from_local(own, weight.device_mesh, layout, run_check=False).full_tensor()


def divided_loss(hidden: Tensor, weight: DTensor, labels: Tensor, bias: DTensor | None = None) -> Tensor:
    """The float32 mean cross-entropy, in nats, of hidden states (..., E) and a weight (V, E), divided by
    rows, over the labels (...) that count. Raises IndexError for a label that is no class.
    """
    logits = _own_logits(hidden, weight, bias).flatten(0, -2)
    labels = labels.flatten()
    is_counted = labels != IGNORED_LABEL
    place, is_here = own_rows(torch.where(is_counted, labels, 0), weight)
    place = torch.where(is_here, place, -1)
    loss: Tensor = _DividedLoss.apply(logits, place, is_counted, weight.device_mesh)
    return loss


def own_rows(ids: Tensor, table: DTensor) -> tuple[Tensor, Tensor]:
    """The row of each id in this rank's part of a table (V, ...), and whether it is there.

    Raises IndexError for an id that no rank has.
    """
    num_rows = table.to_local().shape[0]
    rows = torch.ones(table.shape[0], dtype=torch.bool, device=ids.device)
    is_row = rows.index_select(0, ids.flatten()).view_as(ids)  # for its check: below 0 and above is no row
    place = ids - table.device_mesh.get_local_rank() * num_rows
    return place, is_row & (place >= 0) & (place < num_rows)


def _own_logits(hidden: Tensor, weight: DTensor, bias: DTensor | None) -> Tensor:
    """The logits of this rank's classes. The gradient of `hidden` is summed over the ranks."""
    whole = DTensor.from_local(hidden, weight.device_mesh, [Replicate()], run_check=False)
    hidden = whole.to_local(grad_placements=[Partial()])
    return F.linear(hidden, weight.to_local(), None if bias is None else bias.to_local())


class _DividedLoss(torch.autograd.Function):
    """The mean loss of logits (N, V / ranks), and of the place of each token's class among theirs.

    It is -1 where another rank has the class.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, place: Tensor, is_counted: Tensor, mesh: DeviceMesh) -> Tensor:
        wide = logits.float()
        most = all_reduce(wide.amax(1), "max", mesh)
        of_class = torch.where(_is_class(logits, place), wide, 0).sum(1)
        sums = torch.stack([(wide - most[:, None]).exp().sum(1), of_class])
        exponentials, of_class = all_reduce(sums, "sum", mesh).unbind()
        log_sum = exponentials.log() + most
        count = is_counted.sum()
        ctx.save_for_backward(logits, place, log_sum, is_counted, count)
        return torch.where(is_counted, log_sum - of_class, 0).sum() / count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, place, log_sum, is_counted, count = ctx.saved_tensors
        token_weights = torch.where(is_counted, grad / count, 0)
        probabilities = (logits.float() - log_sum[:, None]).exp()
        difference = probabilities - _is_class(logits, place).float()
        return (difference * token_weights[:, None]).to(logits.dtype), None, None, None


def _is_class(logits: Tensor, place: Tensor) -> Tensor:
    return torch.arange(logits.shape[1], device=logits.device) == place[:, None]
