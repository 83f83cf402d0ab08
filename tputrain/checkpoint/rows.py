"""A rank's rows of a tensor, and the whole of which a checkpoint speaks.

The only place that knows how the two belong together. One process has all rows of everything.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from tputrain.checkpoint.tensor_files import TensorFiles, TensorSpec

if TYPE_CHECKING:
    from tputrain.checkpoint.dcp_files import DcpFiles

SMALLEST_PART = 1 << 20
"""Bytes: where parts are smaller, the first rank writes all of a tensor; shared disks are slow with them."""


@dataclass(frozen=True)
class Rows:
    """What this rank writes of a tensor."""

    whole: TensorSpec
    first: int
    """The row of the whole tensor that `tensor` begins with."""
    tensor: Tensor | None
    """On the host, in memory of its own: training goes on while it is written. None: others write all."""


def rows_of(tensor: Tensor) -> Rows:
    """This rank's rows, copied to the host. To be called by all ranks that have parts of the tensor.

    What is divided otherwise than by rows (tensor parallelism) is exchanged between the ranks first.
    """
    tensor = tensor.detach()
    whole = TensorSpec(tuple(tensor.shape), tensor.dtype)
    if not is_distributed(tensor):
        return Rows(whole, 0, _host_copy(tensor) if _is_first_rank() else None)
    parts = _num_parts(tensor)
    if whole.num_bytes < parts * SMALLEST_PART:
        full = gathered(tensor)
        return Rows(whole, 0, _host_copy(full) if _is_first_rank() else None)
    tensor = _by_rows(tensor)
    if not _is_first_replica(tensor):
        return Rows(whole, 0, None)
    local = tensor.to_local()  # type: ignore[attr-defined]
    return Rows(whole, _region(tensor)[0].start, _host_copy(local))


@torch.no_grad()
def read_into(tensor: Tensor, files: "TensorFiles | DcpFiles", name: str) -> None:
    """Copy a tensor of the files into `tensor`, in place; into a rank's part its part, and read no more."""
    own, region = own_part(tensor)
    if not is_distributed(tensor):
        own.copy_(files.read(name))
    elif own.numel():
        own.copy_(files.read(name, *region))


def read_like(tensor: Tensor | None, files: TensorFiles, name: str) -> Tensor:
    """A tensor of the files: if it has the shape of `tensor`, divided among the ranks alike; else whole."""
    if tensor is None or not is_distributed(tensor) or files.shape(name) != tuple(tensor.shape):
        return files.read(name)
    own, region = own_part(tensor)
    return around(files.read(name, *region).to(own.device), tensor)


def own_part(tensor: Tensor) -> tuple[Tensor, tuple[slice, ...]]:
    """This rank's part of a tensor, sharing its memory, and where in the whole it is, a slice a dimension."""
    if is_distributed(tensor):
        return tensor.to_local(), _region(tensor)  # type: ignore[attr-defined]
    return tensor, tuple(slice(0, size) for size in tensor.shape)


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, sharing its memory; it may be empty."""
    return own_part(tensor)[0] if is_distributed(tensor) else tensor


def gathered(tensor: Any) -> Tensor:
    """All of a tensor, on each rank that has a part of it."""
    return _replicated(tensor, lambda placement: not placement.is_replicate()).to_local()


def summed(tensor: Tensor) -> Tensor:
    """The tensor, divided as it is, where ranks that have parts of what was summed up know theirs alone."""
    return _replicated(tensor, lambda placement: placement.is_partial()) if is_distributed(tensor) else tensor


def _replicated(tensor: Any, chosen: Callable[[Any], bool]) -> Any:
    """The same with no `chosen` placement: one collective for each dimension of the mesh that has one.

    In one call DTensor makes the same ones, and warns that they are several.
    """
    from torch.distributed.tensor import Replicate

    for dim, placement in enumerate(tensor.placements):
        if chosen(placement):
            placements = [*tensor.placements]
            placements[dim] = Replicate()
            tensor = tensor.redistribute(placements=placements)
    return tensor


def divided_like(whole: Tensor, like: Tensor) -> Tensor:
    """A tensor that every rank has, of the shape of `like`, divided among the ranks and placed as that is."""
    if not is_distributed(like):
        return whole.to(like.device)
    own, region = own_part(like)
    return around(whole[region].to(own.device).contiguous(), like)


def is_distributed(tensor: Tensor) -> bool:
    """Whether ranks have parts of it: a DTensor, known by its methods."""
    return hasattr(tensor, "full_tensor")


def around(local: Tensor, like: Any) -> Tensor:
    """The tensor of which `local` is this rank's part, divided as `like` is."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def _by_rows(tensor: Any) -> Any:
    """The same with every dimension of the mesh that divides it dividing its rows."""
    # FSDP's cut of rows that tensor parallelism has cut is no `Shard`, but it has its `dim`.
    if all(each.is_replicate() or each.dim == 0 for each in tensor.placements):
        return tensor
    from torch.distributed.tensor import Shard

    return tensor.redistribute(
        placements=[each if each.is_replicate() else Shard(0) for each in tensor.placements]
    )


def _region(tensor: Any) -> tuple[slice, ...]:
    """This rank's part of the whole, a slice a dimension."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(slice(first, first + size) for first, size in zip(offset, shape, strict=True))


def _num_parts(tensor: Any) -> int:
    sizes = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
    return prod(size for size, placement in sizes if not placement.is_replicate())


def _is_first_replica(tensor: Any) -> bool:
    # A part of the ranks may have all of the tensor, and each other part of them, too (tensor parallelism).
    if not (tensor.device_mesh.mesh == 0).any():
        return False
    coordinates = zip(tensor.device_mesh.get_coordinate(), tensor.placements, strict=True)
    return all(index == 0 for index, placement in coordinates if placement.is_replicate())


def _is_first_rank() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _host_copy(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
