"""Which tensors hold the device's memory: for an out-of-memory error, and for `torch.tpu.memory_summary`."""

from __future__ import annotations

from collections import Counter

from tpu_backend import _C
from tpu_backend.runtime.dtypes import TORCH_DTYPES
from tpu_backend.runtime.signature import signature
from tpu_backend.runtime.user_line import first_line

_LARGEST = 12
_ADVICE = "steps in parts keep what they hand on; torch.tpu.eager_mode('fused') needs less: docs/execution.md"


def describe_memory(device: int = 0) -> str:
    """The live tensors of a device, those alike in one line, the most bytes first.

    An op's line is where this form of it (op, shapes, dtypes) was first met.
    """
    bytes_of: Counter[tuple[str, str]] = Counter()
    count_of: Counter[tuple[str, str]] = Counter()
    for num_bytes, dtype, dims, maker in _C.live_buffers(device):
        shape = f"{str(TORCH_DTYPES[dtype]).removeprefix('torch.')}{dims}"
        made = "from the host" if maker is None else f"{signature(maker).overload} at {first_line(maker)}"
        bytes_of[shape, made] += num_bytes
        count_of[shape, made] += 1
    lines = [f"{count_of.total():,} live tensors hold {bytes_of.total() / 2**20:,.1f} MiB on tpu:{device}"]
    for kind, num_bytes in bytes_of.most_common(_LARGEST):
        shape, made = kind
        lines.append(f"  {num_bytes / 2**20:10,.1f} MiB  {count_of[kind]:5,} x {shape}  {made}")
    if len(bytes_of) > _LARGEST:
        rest = bytes_of.total() - sum(num_bytes for _, num_bytes in bytes_of.most_common(_LARGEST))
        lines.append(f"  {rest / 2**20:10,.1f} MiB  in tensors of {len(bytes_of) - _LARGEST:,} other kinds")
    return "\n".join(lines)


def describe_shortage() -> str:
    """What an out-of-memory error says: which tensors live; where steps are in parts, what needs less."""
    described = describe_memory()
    are_in_parts = _C.compile_stats(_C.current_device())["segments_in_parts"] > 0
    return f"{described}\n{_ADVICE}" if are_in_parts else described
