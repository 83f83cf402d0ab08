"""Pickling tpu tensors (`pickle.dumps`, what sends objects between processes); torch.save needs none of this.

`torch.storage.TypedStorage.__reduce__` writes torch.save's legacy format, which reads device memory at its
address. Registered with `copyreg`, a tpu storage is pickled by way of the host and comes back on its device.
"""

from __future__ import annotations

import copyreg
from typing import Any

import torch


def _on_device(storage: torch.storage.TypedStorage, device: str) -> torch.storage.TypedStorage:
    return torch.storage.TypedStorage(
        wrap_storage=storage._untyped_storage.to(device=torch.device(device)),
        dtype=storage.dtype,
        _internal=True,
    )


def _reduce(storage: torch.storage.TypedStorage) -> Any:
    untyped = storage._untyped_storage
    if untyped.device.type != "tpu":
        return storage.__reduce__()
    host = torch.storage.TypedStorage(wrap_storage=untyped.cpu(), dtype=storage.dtype, _internal=True)
    return _on_device, (host, str(untyped.device))


def install() -> None:
    copyreg.pickle(torch.storage.TypedStorage, _reduce)
