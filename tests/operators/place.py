"""Where a piece of code runs: on the CPU, on the device, or on the CPU in the widest dtype as a reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch

Movable = TypeVar("Movable", torch.Tensor, torch.nn.Module)

_WIDE = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex32: torch.complex128,
    torch.complex64: torch.complex128,
}


@dataclass(frozen=True)
class Place:
    """A device; ``wide`` makes float64 of every floating dtype, complex128 of every complex one."""

    device: str
    wide: bool = False

    def dtype(self, dtype: torch.dtype) -> torch.dtype:
        return _WIDE.get(dtype, dtype) if self.wide else dtype

    def to(self, value: Movable) -> Movable:
        """The tensor or module in this place."""
        if isinstance(value, torch.Tensor):
            return value.to(self.device, self.dtype(value.dtype))
        module = value.to(self.device)
        return module.double() if self.wide else module


CPU, DEVICE, REFERENCE = Place("cpu"), Place("tpu"), Place("cpu", wide=True)
