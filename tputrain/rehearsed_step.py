"""A training step that is recorded and taken back, so that threads can compile its program meanwhile."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn

from tputrain import device as devices
from tputrain import rng


class _Kept:
    """What stood in a dictionary, such as an object's attributes, and in the containers that stood in it."""

    def __init__(self, entries: dict[Any, Any]):
        self._entries, self._was = entries, copy(entries)
        self._contents = [(each, copy(each)) for each in entries.values() if type(each) in (dict, list, set)]

    def put_back(self) -> None:
        """The dictionaries and containers stay the ones they are: others may hold them."""
        for container, contents in self._contents:
            if isinstance(container, list):
                container[:] = contents
            elif isinstance(container, dict):
                _make_equal(container, contents)
            else:
                container.clear()
                container.update(contents)
        _make_equal(self._entries, self._was)


def _make_equal(now: dict[Any, Any], was: dict[Any, Any]) -> None:
    for name in now.keys() - was.keys():
        del now[name]
    for name, value in was.items():
        if now.get(name) is not value:
            now[name] = value


@contextmanager
def taken_back(
    device: torch.device, modules: Iterable[nn.Module], optimizer: torch.optim.Optimizer, *others: object
) -> Iterator[None]:
    """The device compiles what is recorded in here, and runs nothing of it.

    Afterwards its tensors and the generators of random numbers are what they were, and so are the attributes
    of the modules, of the optimizer with its groups and state, and of `others`, with the dictionaries, lists
    and sets among them. Other objects that Python changes are not taken back.
    """
    all_modules = [module for each in modules for module in each.modules()]
    parameters = [each for module in all_modules for each in module.parameters(recurse=False)]
    tensors = [*parameters, *(each for module in all_modules for each in module.buffers(recurse=False))]
    memory = [(each, each.data, each.grad) for each in tensors]
    state = [optimizer.state, *optimizer.state.values(), *optimizer.param_groups]
    kept = [_Kept(each) for each in (*(vars(each) for each in (*all_modules, *others)), *state)]
    values = (value for each in state for value in each.values() if isinstance(value, Tensor))
    on_host = [(each, each.detach().clone()) for each in (*tensors, *values) if each.device.type == "cpu"]
    generators = rng.snapshot()
    try:
        with devices.rehearsal(device):
            yield
    finally:
        for each in kept:
            each.put_back()
        for tensor, data, gradient in memory:
            tensor.grad = gradient
            if tensor.data_ptr() != data.data_ptr():
                tensor.data = data
        with torch.no_grad():
            for tensor, was in on_host:
                tensor.copy_(was)
        rng.put_back(generators)
