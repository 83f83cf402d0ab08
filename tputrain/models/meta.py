"""Models whose parameters have no memory yet, so that a rank never holds more of them than its part."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from tputrain.errors import UserError


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """In here parameters of new modules go to the meta device, one by one; buffers are made as ever.

    `torch.device("meta")` would leave buffers without values, and no checkpoint holds rotation tables.
    """
    handle = register_module_parameter_registration_hook(_on_meta)  # type: ignore[arg-type]  # what it returns counts
    try:
        yield
    finally:
        handle.remove()


def _on_meta(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
    if parameter.is_meta:  # tied to one that is registered already: it has to stay the same
        return None
    return nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)


def is_on_meta(model: nn.Module) -> bool:
    """Whether parameters of the model are on the meta device. Raises UserError where a buffer is."""
    for name, buffer in model.named_buffers():
        if buffer.is_meta:
            raise UserError(
                f"Trainer: the model's buffer {name} is on the meta device, and nothing gives it values: "
                "expected parameters alone there, as in `with tputrain.models.parameters_on_meta():`"
            )
    return any(parameter.is_meta for parameter in model.parameters())


def move(device: torch.device, *functions: Any) -> None:
    """Move to `device`, in place, what has values of those of these that are modules."""
    for module in functions:
        if not isinstance(module, nn.Module):
            continue
        if is_on_meta(module):
            module._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))
        else:
            module.to(device)


def allocate(model: nn.Module, device: torch.device) -> None:
    """Give what is on the meta device memory on `device`, of any content; what is tied stays tied."""

    def allocated(tensor: Tensor) -> Tensor:
        return torch.empty_like(tensor, device=device) if tensor.is_meta else tensor

    if not is_on_meta(model):
        return
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)  # the same objects with other contents
    try:
        model._apply(allocated)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swaps)
