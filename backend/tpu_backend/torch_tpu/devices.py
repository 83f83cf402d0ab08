"""The devices of this process: how many there are, which one is current, and waiting for one."""

from __future__ import annotations

from typing import Any

import torch

from tpu_backend import _C


def is_available() -> bool:
    """Always true. Without a TPU the device is XLA on the CPU, and says so at its first use."""
    return True


def is_initialized() -> bool:
    """Whether a first use of the device has started JAX."""
    return _C.is_initialized()


def init() -> None:
    """Start the device now instead of at its first use."""
    _C.ensure_initialized()


def _lazy_init() -> None:
    """PyTorch calls it where it only asks which device is current, as in each compilation of a graph of CPU
    tensors. The device starts by itself when the first tensor needs it.
    """


def device_count() -> int:
    """Number of tpu devices that this process sees. It never changes."""
    return _C.device_count()


def current_device() -> int:
    return _C.current_device()


def index_of(device: Any) -> int:
    """The index of the device that "tpu", "tpu:1", 1, torch.device or None (the current device) names.

    A launcher's LOCAL_RANK is a name of the one device that its process has.
    Raises ValueError for another kind of device, RuntimeError for an index that does not exist.
    """
    if device is None:
        return _C.current_device()
    if isinstance(device, int):
        index = device
    else:
        parsed = torch.device(device)
        if parsed.type != "tpu":
            raise ValueError(f"expected a tpu device, got {parsed}")
        index = _C.current_device() if parsed.index is None else parsed.index
    if index < 0:
        raise RuntimeError(f"tpu:{index} does not exist: devices have numbers from 0 on")
    return _C.find_device(index)


def set_device(device: Any) -> None:
    """Make a device current."""
    _C.set_device(index_of(device))


class device:  # noqa: N801 - torch.cuda's name
    """Context manager that makes a device current."""

    def __init__(self, device: Any):
        self.idx = index_of(device)
        self.prev_idx = -1

    def __enter__(self) -> None:
        self.prev_idx = _C.current_device()
        _C.set_device(self.idx)

    def __exit__(self, *_: object) -> None:
        _C.set_device(self.prev_idx)


class device_of(device):  # noqa: N801 - torch.cuda's name
    """Context manager that makes the device of a tensor current. Other tensors change nothing."""

    def __init__(self, tensor: torch.Tensor):
        super().__init__(tensor.device.index if tensor.device.type == "tpu" else None)


def synchronize(device: Any = None) -> None:
    """Run everything recorded and wait until it has finished."""
    _C.synchronize(index_of(device))


def flush(device: Any = None) -> None:
    """Hand everything recorded so far to XLA as one program, without waiting for it."""
    _C.flush(index_of(device))


def _is_in_bad_fork() -> bool:
    """Whether the device cannot be used here, because the process that forked this one had started it."""
    return _C.is_forked()
