"""Calls whose result the CPU does not define, or that are a documented limit: no program has them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch

# Where a float becomes an integer: C++ says nothing of what is out of range.
_CONVERSIONS = re.compile(
    r"\.to\(|\.type\(|\.long\(|copy_\(|__setitem__|dtype=|set_\(|fill_\(|\.view\(torch"
    r"|(slice|select|diagonal)_scatter|(sum|prod)\(.*out="
)
_IN_PLACE = re.compile(r"^t\d+\.\w*[a-z0-9]_\(")
_SHIFTS = re.compile(r"_shift|__ilshift__")
_DIVISIONS = re.compile(r"floor_divide|remainder|fmod|//|%|rounding_mode|div_")

_NOT_POINTWISE = re.compile(
    r"torch\.(sum|prod|cumsum|mean|matmul|linspace|softmax|cat|stack|amax|any|argmax|index_select|gather|tril"
    r"|nonzero|diag|arange|full)\("
)


def before(text: str, inputs: Sequence[torch.Tensor]) -> bool:
    """What must not even be tried."""
    if _SHIFTS.search(text):
        # By less than 0, or by as many bits as there are.
        least = min((bits(tensor) for tensor in inputs), default=8)
        last = inputs[-1] if len(inputs) > 1 else None
        numbers = [float(number) for number in re.findall(r"(-?\d+)\)?$", text)]
        amounts = last.flatten().tolist() if last is not None else numbers
        return not amounts or any(
            isinstance(amount, complex) or not 0 <= amount < least - 1 for amount in amounts
        )
    if "resize_" in text:
        return True  # what is added is not initialised
    if "out=" in text and _NOT_POINTWISE.search(text):
        # These kernels write while they read; the device refuses, or computes first.
        return _share_memory(inputs)
    if "out=" in text and any(
        tensor.numel() > inputs[-1].numel() and _share_memory([tensor, inputs[-1]]) for tensor in inputs
    ):
        return True  # a result that grows into what is still to be read, which the CPU does not see
    if _DIVISIONS.search(text):
        # The least integer by -1: the CPU traps, or wraps.
        return any(
            not tensor.is_floating_point()
            and not tensor.is_complex()
            and tensor.dtype != torch.bool
            and bool((tensor == torch.iinfo(tensor.dtype).min).any())
            and torch.iinfo(tensor.dtype).min < 0
            for tensor in inputs
        )
    return False


def _share_memory(tensors: Sequence[torch.Tensor]) -> bool:
    storages = [tensor.untyped_storage()._cdata for tensor in tensors]
    return len({*storages}) < len(storages)


def _is_written_while_it_is_read(written: torch.Tensor, *read: torch.Tensor) -> bool:
    """In an order of the CPU's, where it has not noticed."""

    def geometry(tensor: torch.Tensor) -> tuple[object, ...]:
        return tensor.shape, tensor.stride(), tensor.storage_offset()

    return _shares_elements(written) or any(
        _share_memory([written, tensor]) and geometry(tensor) != geometry(written) for tensor in read
    )


def _shares_elements(tensor: torch.Tensor) -> bool:
    places = torch.zeros((), dtype=torch.int64)
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        places = places[..., None] + torch.arange(size) * stride
    return len(places.unique()) < places.numel()


def bits(tensor: torch.Tensor) -> int:
    return tensor.element_size() * 8


def after(text: str, inputs: Sequence[torch.Tensor], result: Any) -> bool:
    if _IN_PLACE.search(text) and _is_written_while_it_is_read(*inputs):
        return True
    results = [result] if isinstance(result, torch.Tensor) else []
    if isinstance(result, (tuple, list)):
        results = [item for item in result if isinstance(item, torch.Tensor)]
    if any(_has_subnormal(tensor) for tensor in results):
        return True  # XLA takes them for 0, as a TPU does
    if _CONVERSIONS.search(text):
        for made in results:
            if made.is_floating_point() or made.is_complex() or made.dtype == torch.bool:
                continue
            bounds = torch.iinfo(made.dtype)
            for tensor in inputs:
                if not (tensor.is_floating_point() or tensor.is_complex()):
                    continue
                wide = (tensor.real if tensor.is_complex() else tensor).double()
                if not bool(((wide > bounds.min - 1) & (wide < bounds.max)).all()):
                    return True
    return False


def error(text: str, error: Exception) -> bool:
    """Errors that say nothing of the call: this process's own."""
    return isinstance(error, (NameError, MemoryError, SyntaxError)) or "INTERNAL ASSERT" in str(error)


def _has_subnormal(tensor: torch.Tensor) -> bool:
    if tensor.dtype == torch.complex64:
        tensor = torch.view_as_real(tensor.resolve_conj())
    if tensor.dtype not in (torch.float32, torch.float64, torch.bfloat16):
        return False
    magnitude = tensor.abs()
    return bool(((magnitude > 0) & (magnitude < torch.finfo(tensor.dtype).tiny)).any())
