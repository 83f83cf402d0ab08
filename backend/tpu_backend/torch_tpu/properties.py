"""What a device is and can do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tpu_backend.torch_tpu.devices import index_of, init
from tpu_backend.torch_tpu.memory import mem_get_info


@dataclass(frozen=True, repr=False)
class _DeviceProperties:
    name: str
    platform: str
    total_memory: int  # bytes
    multi_processor_count: int = 1

    def __repr__(self) -> str:
        return (
            f"_TpuDeviceProperties(name={self.name!r}, platform={self.platform!r}, "
            f"total_memory={self.total_memory // 2**20}MB)"
        )


def get_device_properties(device: Any = None) -> _DeviceProperties:
    """Name, XLA platform (tpu, cuda or cpu) and total memory in bytes of a device."""
    index = index_of(device)
    init()
    from tpu_backend.runtime.platform import platform

    found = platform()
    return _DeviceProperties(found.devices[index].device_kind, found.name, mem_get_info(index)[1])


def get_device_name(device: Any = None) -> str:
    """The chip behind the device, as XLA names it: "TPU v5e", "NVIDIA H200", "cpu"."""
    return get_device_properties(device).name


def get_device_capability(device: Any = None) -> tuple[int, int]:
    """XLA has no compute capability; (0, 0) keeps scripts that ask going."""
    return (0, 0)


def can_device_access_peer(device: Any, peer_device: Any) -> bool:
    return False


def is_bf16_supported(including_emulation: bool = True) -> bool:
    """XLA computes in bfloat16 on every platform."""
    return True


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]
