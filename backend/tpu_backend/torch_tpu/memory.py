"""How much memory the device has, and what holds it."""

from __future__ import annotations

import gc
import os
from typing import Any

from tpu_backend import _C
from tpu_backend.torch_tpu.devices import index_of, init, is_initialized


def memory_allocated(device: Any = None) -> int:
    """Bytes that live tensors hold. A storage counts once."""
    return _C.memory_counters(index_of(device))[0]


def max_memory_allocated(device: Any = None) -> int:
    return _C.memory_counters(index_of(device))[1]


def memory_reserved(device: Any = None) -> int:
    """The same as `memory_allocated`: XLA keeps no free memory in reserve for tensors."""
    return memory_allocated(device)


max_memory_reserved = max_memory_allocated


def reset_peak_memory_stats(device: Any = None) -> None:
    _C.reset_peak_memory(index_of(device))


reset_max_memory_allocated = reset_peak_memory_stats


def memory_stats(device: Any = None) -> dict[str, int]:
    """Counters in bytes, under torch.cuda's names where it has them.

    ``executable_temp_bytes`` is what the hungriest compiled program needs beside the live buffers.
    """
    current, peak, allocations = _C.memory_counters(index_of(device))
    temporary = 0
    if is_initialized():
        from tpu_backend.runtime.compiler import largest_temporary

        temporary = largest_temporary()
    return {
        "allocated_bytes.all.current": current,
        "allocated_bytes.all.peak": peak,
        "allocation.all.allocated": allocations,
        "live_bytes": current,
        "executable_temp_bytes": temporary,
    }


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """(free, total) bytes: of the chip if XLA tells, of the host if the device is the CPU."""
    index = index_of(device)
    init()
    from tpu_backend.runtime.platform import platform

    stats = platform().devices[index].memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats["bytes_in_use"], stats["bytes_limit"]
    page = os.sysconf("SC_PAGE_SIZE")
    return os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page


def memory_summary(device: Any = None, abbreviated: bool = False) -> str:
    """A table of the live tensors. A line holds all tensors that are alike: bytes, count, dtype, shape, the
    op that made them and its Python line. It lists the largest dozen kinds, with `abbreviated` or without.
    """
    index = index_of(device)
    init()
    from tpu_backend.runtime.memory import describe_memory

    return describe_memory(index)


def empty_cache() -> None:
    """Release what Python's garbage still holds. The device caches nothing beyond live tensors."""
    gc.collect()


def ipc_collect() -> None:
    """Do nothing: no memory is shared with other processes."""
