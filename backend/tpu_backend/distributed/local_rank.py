"""LOCAL_RANK as the number of a rank's device, where PyTorch compares that number before the device sees it.

`init_process_group(device_id=...)` compares it with the number of devices, and DDP's `device_ids` with the
devices of its inputs.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import nn

from tpu_backend.torch_tpu.devices import index_of


def accept_in_group(c10d: ModuleType) -> None:
    """Let `init_process_group` take a device by LOCAL_RANK."""
    taking = _with_device_id(c10d.init_process_group)
    for module in (c10d, sys.modules["torch.distributed"]):  # which has its names from the other
        module.init_process_group = taking  # type: ignore[attr-defined]


def _with_device_id(make: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(make)
    def init_process_group(*args: Any, **kwargs: Any) -> None:
        if kwargs.get("device_id") is not None:
            device = torch.device(kwargs["device_id"])
            if device.type == "tpu" and device.index is not None:
                kwargs["device_id"] = torch.device("tpu", index_of(device))
        make(*args, **kwargs)

    return init_process_group


def accept_in_ddp(distributed: ModuleType) -> None:
    """Let DistributedDataParallel take a device by LOCAL_RANK, for a module on the device."""
    ddp = distributed.DistributedDataParallel
    ddp.__init__ = _with_device_ids(ddp.__init__)


def _with_device_ids(make: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(make)
    def take(
        self: Any,
        module: nn.Module,
        device_ids: Sequence[Any] | None = None,
        output_device: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        parameter = next(module.parameters(), None)
        if parameter is not None and parameter.device.type == "tpu":
            device_ids = device_ids and [index_of(device) for device in device_ids]
            output_device = None if output_device is None else index_of(output_device)
        make(self, module, device_ids, output_device, *args, **kwargs)

    return take
