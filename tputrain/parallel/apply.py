"""How a model is laid out over ranks. It knows no model by name."""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from tputrain.models.vocabulary_loss import VocabularyHead
from tputrain.parallel.blocks import blocks
from tputrain.parallel.placement import placements


def apply_plan(
    model: nn.Module,
    mesh: DeviceMesh,
    plan: Mapping[str, Any],
    placement: Mapping[str, Any],
    compile_block: Callable[[nn.Module], None],
) -> None:
    """Lay out `model` over `mesh` (replicate, shard; context and tensor if there are several), in place.

    Its parameters become DTensors. `plan` and `placement`: those of ParallelConfig.
    """
    # 1. Tensor parallelism, on the whole matrices.
    if "tensor" in (mesh.mesh_dim_names or ()):
        from tputrain.parallel.tensor_plan import parallelise_layers

        parallelise_layers(model, mesh["tensor"], plan)
    # 2. Activation checkpointing is the model's own (model.activation_checkpointing), inside a block already.
    # 3. Compilation of each block by itself, where a phase is compiled: FSDP comes around it.
    for block in [*blocks(model)] or [model]:
        compile_block(block)
    # 4. FSDP, of what a tensor rank has. Also among one data rank: there, too, it brings gradients into the
    # layout of their parameters.
    # Ranks that share sequences divide the weights among them, too, as those that have other samples do.
    if "context" in (mesh.mesh_dim_names or ()):
        together = mesh["shard", "context"]._flatten("shard_and_context")
        data = DeviceMesh._concatenate([mesh["replicate"], together])
    else:
        data = mesh["replicate", "shard"]
    dims = placements(model, placement, data.size(1))
    heads = _heads(model)
    for block in (*blocks(model), *heads):
        fully_shard(block, mesh=data, shard_placement_fn=dims)
    # Resharded after the forward pass, too: outside of a pass the parameters are always the sharded ones.
    fully_shard(model, mesh=data, reshard_after_forward=True, shard_placement_fn=dims)


def _heads(model: nn.Module) -> list[nn.Module]:
    """Those outside of blocks that make the loss, with weights that nobody else has."""
    uses = Counter(id(each) for _, each in model.named_parameters(remove_duplicate=False))
    inside = {id(model), *(id(each) for block in blocks(model) for each in block.modules())}
    found = (each for each in model.modules() if isinstance(each, VocabularyHead) and id(each) not in inside)
    return [each for each in found if all(uses[id(own)] == 1 for own in each.parameters())]
