"""What `torch.load` asks of a device, under the name by which it looks for it."""

from __future__ import annotations

from typing import Any

from tpu_backend.torch_tpu.devices import index_of


def _get_device_index(device: Any, optional: bool = False) -> int:
    return index_of(device)
