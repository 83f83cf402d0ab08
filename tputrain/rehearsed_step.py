"""A training step that is recorded and taken back, so that threads can compile its program meanwhile."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from tputrain import device as devices
from tputrain import rng


@contextmanager
def taken_back(device: torch.device, model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """The device compiles what is recorded in here, and runs nothing of it. Afterwards its tensors, the
    model's gradients, the optimizer and all generators of random numbers are what they were.
    """
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    generators = rng.snapshot()
    groups = [dict(group) for group in optimizer.param_groups]
    states = {tensor: dict(state) for tensor, state in optimizer.state.items()}
    on_host = [
        (value, value.clone())
        for state in states.values()
        for value in state.values()
        if isinstance(value, Tensor) and value.device.type == "cpu"
    ]
    try:
        with devices.rehearsal(device):
            yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for now, before in zip(optimizer.param_groups, groups, strict=True):
            now.clear()
            now.update(before)
        for tensor in [*optimizer.state]:
            if tensor not in states:
                del optimizer.state[tensor]
        for tensor, state in states.items():
            optimizer.state[tensor].clear()
            optimizer.state[tensor].update(state)
        with torch.no_grad():
            for value, was in on_host:
                value.copy_(was)
        rng.put_back(generators)
