"""The repeated layers of a model, which are divided and planned one by one."""

from collections.abc import Iterator

from torch import nn


def blocks(model: nn.Module) -> Iterator[nn.Module]:
    """The repeated parts of a model: the elements of each ModuleList that is in no other one."""
    for module in model.children():
        if isinstance(module, nn.ModuleList):
            yield from (each for each in module if any(True for _ in each.parameters()))
        else:
            yield from blocks(module)
