"""Tensors that a graph holds itself, such as `torch.tensor([1, 2])` in a forward, become inputs of it."""

from __future__ import annotations

import operator

import torch
from torch import fx


def lift_constants(module: fx.GraphModule) -> list[torch.Tensor]:
    """Give the graph a placeholder, behind the others, for each tensor that it reads from an attribute.

    Returns the tensors, in the order of those placeholders. An input, and not a number in the program: what
    a tensor holds must not be read from the device, nor compiled.
    """
    tensors = []
    point = next(iter(module.graph.nodes))
    for node in module.graph.find_nodes(op="placeholder"):
        point = node.next
    for node in module.graph.find_nodes(op="get_attr"):
        tensor = operator.attrgetter(node.target)(module)
        if not isinstance(tensor, torch.Tensor):
            continue
        with module.graph.inserting_before(point):
            lifted = module.graph.placeholder(f"{node.name}_lifted")
        lifted.meta = dict(node.meta)
        tensors.append(tensor)
        node.replace_all_uses_with(lifted)
        point = node.next if point is node else point
        module.graph.erase_node(node)
    if tensors:
        module.recompile()
    return tensors
