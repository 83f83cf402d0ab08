"""Tensors that a graph holds itself, such as `torch.tensor([1, 2])` in a forward, become inputs of it."""

from __future__ import annotations

import torch
from torch import fx


def lift_constants(module: fx.GraphModule) -> list[torch.Tensor]:
    """Give the graph a placeholder, behind the others, for each tensor that it reads from an attribute.

    Returns the tensors, in the order of those placeholders. An input, and not a number in the program: what
    a tensor holds must not be read from the device, nor compiled.
    """
    nodes = [node for node in module.graph.find_nodes(op="get_attr") if _is_tensor(module, node)]
    if not nodes:
        return []
    tensors = []
    last = list(module.graph.find_nodes(op="placeholder"))[-1:]
    for node in nodes:
        point = last[0] if last else next(iter(module.graph.nodes))
        with module.graph.inserting_after(point) if last else module.graph.inserting_before(point):
            lifted = module.graph.placeholder(f"{node.name}_lifted")
        tensors.append(_attribute(module, node))
        lifted.meta = dict(node.meta)
        node.replace_all_uses_with(lifted)
        module.graph.erase_node(node)
        last = [lifted]
    module.recompile()
    return tensors


def _is_tensor(module: fx.GraphModule, node: fx.Node) -> bool:
    return isinstance(_attribute(module, node), torch.Tensor)


def _attribute(module: fx.GraphModule, node: fx.Node) -> object:
    value: object = module
    for name in str(node.target).split("."):
        value = getattr(value, name)
    return value
