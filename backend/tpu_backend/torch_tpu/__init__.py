"""The module `torch.tpu`, in the shape of `torch.cuda`: the names of this package's files, and no code."""

# ruff: noqa: F401

from typing import Any

from tpu_backend.torch_tpu import _utils
from tpu_backend.torch_tpu.cache import get_executable_cache, set_executable_cache
from tpu_backend.torch_tpu.devices import (
    _is_in_bad_fork,
    _lazy_init,
    current_device,
    device,
    device_count,
    device_of,
    flush,
    init,
    is_available,
    is_initialized,
    set_device,
    synchronize,
)
from tpu_backend.torch_tpu.memory import (
    empty_cache,
    ipc_collect,
    max_memory_allocated,
    max_memory_reserved,
    mem_get_info,
    memory_allocated,
    memory_reserved,
    memory_stats,
    memory_summary,
    reset_max_memory_allocated,
    reset_peak_memory_stats,
)
from tpu_backend.torch_tpu.modes import eager_mode, get_eager_mode, get_pad_sizes, get_parts, pad_sizes
from tpu_backend.torch_tpu.properties import (
    can_device_access_peer,
    get_amp_supported_dtype,
    get_device_capability,
    get_device_name,
    get_device_properties,
    is_bf16_supported,
)
from tpu_backend.torch_tpu.random import (
    default_generators,
    get_rng_state,
    get_rng_state_all,
    initial_seed,
    manual_seed,
    manual_seed_all,
    seed,
    seed_all,
    set_rng_state,
    set_rng_state_all,
)
from tpu_backend.torch_tpu.statistics import (
    compilations,
    compile_stats,
    fallback_stats,
    is_compiling,
    is_compiling_ahead,
    recent_ops,
    reset_fallback_stats,
)
from tpu_backend.torch_tpu.steps import capture, is_current_stream_capturing, rehearsal, spmd
from tpu_backend.torch_tpu.streams import Event, Stream, current_stream, default_stream, set_stream, stream


def __getattr__(name: str) -> Any:
    if name == "_initialized":  # activation checkpointing asks for it, and else keeps no generator state
        return is_initialized()
    raise AttributeError(f"module 'torch.tpu' has no attribute {name!r}")
