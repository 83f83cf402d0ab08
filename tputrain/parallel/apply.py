"""How a model is laid out over ranks. It knows no model by name."""

from collections.abc import Iterator

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard


def apply_plan(model: nn.Module, mesh: DeviceMesh) -> None:
    """Lay out `model` over `mesh` (replicate, shard), in place: its parameters become DTensors.

    Tensor parallelism would come first, on the whole matrices. Activation checkpointing is the model's own
    (model.activation_checkpointing) and is inside a block already.
    """
    for block in blocks(model):
        fully_shard(block, mesh=mesh)
    # Resharded after the forward pass, too: outside of a pass the parameters are always the sharded ones.
    fully_shard(model, mesh=mesh, reshard_after_forward=True)


def blocks(model: nn.Module) -> Iterator[nn.Module]:
    """The repeated parts of a model: the elements of each ModuleList that is in no other one."""
    for module in model.children():
        if isinstance(module, nn.ModuleList):
            yield from (each for each in module if any(True for _ in each.parameters()))
        else:
            yield from blocks(module)
