"""Independent copies of a sample's arguments in another place, the same to the last stride."""

from __future__ import annotations

from typing import Any

import torch

from tests.operators.place import Place


class Twin:
    """Copies values to one place; tensors that share a storage share the copy's storage.

    Lists, tuples and dicts are copied through; "cpu" as a device argument becomes the place's device, a
    dtype the place's dtype.
    """

    def __init__(self, place: Place):
        self._place = place
        self._storages: dict[int, torch.Tensor] = {}
        self._tensors: dict[int, torch.Tensor] = {}
        self._originals: list[torch.Tensor] = []

    def of(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, (torch.device, str)) and str(value) == "cpu":
            return type(value)(self._place.device)
        if isinstance(value, torch.dtype):
            return self._place.dtype(value)
        if isinstance(value, torch.Generator):
            return torch.Generator(self._place.device).manual_seed(value.initial_seed())
        if isinstance(value, (list, tuple)):
            items = [self.of(item) for item in value]
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        if isinstance(value, dict):
            return {name: self.of(item) for name, item in value.items()}
        return value

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        known = self._tensors.get(id(tensor))
        if known is not None:
            return known
        with torch.no_grad():
            copy = self._copy(tensor.detach())
        copy.requires_grad_(tensor.requires_grad)
        self._tensors[id(tensor)] = copy
        self._originals.append(tensor)  # keeps the id
        return copy

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout != torch.strided or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            return self._place.to(tensor.clone())
        conjugate, negative = tensor.is_conj(), tensor.is_neg()
        if conjugate:
            tensor = torch._conj(tensor)
        if negative:
            tensor = torch._neg_view(tensor)
        storage = tensor.untyped_storage()
        base = self._storages.get(storage._cdata)
        if base is None or base.dtype != self._place.dtype(tensor.dtype):
            count = storage.nbytes() // tensor.element_size()
            whole = tensor.as_strided((count,), (1,), 0)
            if count == tensor.numel() and tensor.is_contiguous():
                whole = whole.view(
                    tensor.shape
                )  # the device keeps the shape in which a buffer is first written
            base = self._storages[storage._cdata] = self._place.to(whole.clone())
        if base.shape == tensor.shape and base.stride() == tensor.stride() and tensor.storage_offset() == 0:
            copy = base.view(base.shape)
        else:
            copy = base.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        if conjugate:
            copy = torch._conj(copy)
        if negative:
            copy = torch._neg_view(copy)
        return copy
