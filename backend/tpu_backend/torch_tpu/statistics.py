"""What the device has recorded, compiled and left to the CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tpu_backend import _C, compiling
from tpu_backend.torch_tpu.devices import is_initialized

if TYPE_CHECKING:
    from tpu_backend.runtime.compile_log import Compilation


def compile_stats() -> dict[str, Any]:
    """Counters since the start of the process.

    - ops_recorded; segments_run; segments_in_parts, each of which is several of the segments run
    - compilations, memory_hits, disk_hits: a program comes from a compilation or from disk
      (`set_executable_cache`)
    - compile_seconds: the time that programs were waited for; threads may have compiled longer
    - host_reads; replays of captured steps
    """
    return _C.compile_stats(_C.current_device())


def compilations() -> list[Compilation]:
    """The last 256 programs that were compiled, oldest first.

    Each has its operations, its seconds and its cause: how it differs from the nearest program before it,
    and the Python line. ``TPU_LOGS=compile`` prints them.
    """
    if not is_initialized():
        return []
    from tpu_backend.runtime import compile_log

    return compile_log.compilations()


def is_compiling() -> bool:
    """Whether some thread of this process is compiling a program that is waited for. Takes no lock."""
    return compiling.is_compiling()


def is_compiling_ahead() -> bool:
    """Whether threads are still compiling for a rehearsal or for a step in parts."""
    if not is_initialized():
        return False
    from tpu_backend.runtime import ahead

    return ahead.is_busy()


def recent_ops() -> list[tuple[str, bool]]:
    """The operations recorded last (at most 32, oldest first), each with its tensors, and whether its program
    was launched. It waits for no other thread: it is for a report on a process that hangs.
    """
    if not is_initialized():
        return []
    from tpu_backend.runtime.signature import signature

    numbers, num_pending = _C.recent_entries(_C.current_device())
    calls = [signature(number).described() for number in numbers]
    return [(call, position < len(calls) - num_pending) for position, call in enumerate(calls)]


def fallback_stats() -> dict[str, int]:
    """{operator: calls} that ran on the CPU because they have no lowering."""
    return _C.fallback_stats()


def reset_fallback_stats() -> None:
    _C.clear_fallback_stats()
