"""The repeated layers of a model, which are divided and planned one by one."""

import re
from collections.abc import Iterator
from typing import Any

from torch import nn

_NUMBERS = re.compile(r"(?<![^ .])\d+(?![^.])")
_NUMBERS_OF_A_LAYER = ("layer_idx", "layer_id", "layer_index", "layer_number")


def lists_of_blocks(model: nn.Module) -> Iterator[nn.ModuleList]:
    """Each ModuleList with parameters that is in no other one."""
    for module in model.children():
        if isinstance(module, nn.ModuleList):
            if any(True for _ in module.parameters()):
                yield module
        else:
            yield from lists_of_blocks(module)


def blocks(model: nn.Module) -> Iterator[nn.Module]:
    """The repeated parts of a model: the elements of each ModuleList that is in no other one."""
    for found in lists_of_blocks(model):
        yield from (each for each in found if any(True for _ in each.parameters()))


def without_numbers(name: str) -> str:
    """The same for all layers: "forward layers.*.mlp"."""
    return _NUMBERS.sub("*", name)


def signature(module: nn.Module) -> Any:
    """What two layers that do the same have in common."""
    described = []
    for name, each in module.named_modules():
        settings = {
            key: value
            for key, value in vars(each).items()
            if isinstance(value, int | float | str | bool) and key not in _NUMBERS_OF_A_LAYER
        }
        described.append((name, type(each), tuple(sorted(settings.items(), key=lambda item: item[0]))))
    tensors = [*module.named_parameters(), *module.named_buffers()]
    shapes = tuple((name, tuple(each.shape), each.dtype, each.requires_grad) for name, each in tensors)
    return tuple(described), shapes


def period(layers: nn.ModuleList) -> int:
    """After so many layers the list begins again with layers that do the same."""
    kinds = [signature(each) for each in layers]
    return next(
        size
        for size in range(1, len(kinds) + 1)
        if all(a == b for a, b in zip(kinds, kinds[size:], strict=False))
    )
