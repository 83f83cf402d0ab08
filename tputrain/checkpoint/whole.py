"""Between the whole tensors of a checkpoint and those of a run, of which each rank may have a part.

The only place that knows how a rank's part and the whole belong together. A DTensor is known by its methods:
one process needs nothing of torch.distributed.
"""

from typing import Any

import torch
from torch import Tensor


def whole(tensor: Tensor) -> Tensor:
    """A copy of the whole tensor on the host, in memory of its own: training goes on while it is written.

    Of a tensor that ranks have parts of: on the first rank only, and to be called by all; an empty one on
    the others.
    """
    tensor = tensor.detach()
    if is_distributed(tensor):
        mesh: Any = tensor.device_mesh  # type: ignore[attr-defined]
        tensor = tensor.full_tensor()  # type: ignore[attr-defined]
        if mesh.get_rank() != 0:
            return torch.empty(0, dtype=tensor.dtype)
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)


@torch.no_grad()
def put(tensor: Tensor, value: Tensor) -> None:
    """Copy a whole `value` on the host into `tensor`, in place; into a rank's part the part."""
    if is_distributed(tensor):
        part: Any = part_like(tensor, value)
        tensor.to_local().copy_(part.to_local())  # type: ignore[attr-defined]
    else:
        tensor.copy_(value)


def part_like(tensor: Tensor, value: Tensor) -> Tensor:
    """`value`, a whole one on the host, laid out over the ranks as `tensor` is, if that has its shape."""
    if not is_distributed(tensor) or value.shape != tensor.shape:
        return value
    from torch.distributed.tensor import distribute_tensor

    # Each rank has read the whole, so nothing need be sent.
    return distribute_tensor(value, tensor.device_mesh, tensor.placements, src_data_rank=None)  # type: ignore[attr-defined]


def is_distributed(tensor: Tensor) -> bool:
    """Whether ranks have parts of it."""
    return hasattr(tensor, "full_tensor")
