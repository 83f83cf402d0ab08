"""`torch.tpu`: the device module, in the shape of `torch.cuda`."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from tpu_backend import _C, compiling, executable_cache, nan_check

if TYPE_CHECKING:
    from tpu_backend.runtime.compile_log import Compilation

_MODES = ("debug", "strict", "fused")  # as in csrc/stream.h
_PARTS = ("never", "first", "prepare", "always")  # as in csrc/program.h


# ---- devices -----------------------------------------------------------------------------------------------


def is_available() -> bool:
    """Always true: without a TPU the device is XLA on the CPU, and says so at first use."""
    return True


def is_initialized() -> bool:
    """Whether JAX has been started by a first use of the device."""
    return _C.is_initialized()


def init() -> None:
    """Start the device now instead of at first use."""
    _C.ensure_initialized()


_lazy_init = init


def __getattr__(name: str) -> Any:
    if name == "_initialized":  # activation checkpointing asks for it, and else keeps no generator state
        return is_initialized()
    raise AttributeError(f"module 'torch.tpu' has no attribute {name!r}")


def device_count() -> int:
    """Number of tpu devices that this process sees; constant for its life."""
    return _C.device_count()


def current_device() -> int:
    return _C.current_device()


def _index(device: Any) -> int:
    """The index in "tpu", "tpu:1", 1, torch.device or None (the current device).

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
    if not 0 <= index < device_count():
        raise RuntimeError(f"tpu:{index} does not exist: {_how_many()}")
    return index


def _how_many() -> str:
    return (
        "there is one tpu device, tpu:0" if device_count() == 1 else f"there are {device_count()} tpu devices"
    )


def set_device(device: Any) -> None:
    _C.set_device(_index(device))


class device:  # noqa: N801 - torch.cuda's name
    """Context manager that makes a device current."""

    def __init__(self, device: Any):
        self.idx = _index(device)
        self.prev_idx = -1

    def __enter__(self) -> None:
        self.prev_idx = _C.current_device()
        _C.set_device(self.idx)

    def __exit__(self, *_: object) -> None:
        _C.set_device(self.prev_idx)


class device_of(device):  # noqa: N801 - torch.cuda's name
    """Context manager that makes the device of a tensor current; does nothing for other tensors."""

    def __init__(self, tensor: torch.Tensor):
        super().__init__(tensor.device.index if tensor.device.type == "tpu" else None)


def synchronize(device: Any = None) -> None:
    """Run everything recorded and wait until it has finished."""
    _C.synchronize(_index(device))


def flush(device: Any = None) -> None:
    """Hand everything recorded so far to XLA as one program, without waiting for it."""
    _C.flush(_index(device))


def get_device_name(device: Any = None) -> str:
    """The chip behind the device, as XLA names it: "TPU v5e", "NVIDIA H200", "cpu"."""
    return str(get_device_properties(device).name)


class _DeviceProperties:
    def __init__(self, name: str, platform: str, total_memory: int):
        self.name, self.platform, self.total_memory = name, platform, total_memory
        self.multi_processor_count = 1

    def __repr__(self) -> str:
        return (
            f"_TpuDeviceProperties(name={self.name!r}, platform={self.platform!r}, "
            f"total_memory={self.total_memory // 2**20}MB)"
        )


def get_device_properties(device: Any = None) -> _DeviceProperties:
    """Name, XLA platform (tpu, cuda or cpu) and total memory in bytes of a device."""
    index = _index(device)
    init()
    from tpu_backend.runtime.platform import platform

    found = platform()
    return _DeviceProperties(found.devices[index].device_kind, found.name, mem_get_info(index)[1])


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


def _is_in_bad_fork() -> bool:
    """Whether this process was forked from one that had started the device, which cannot be used here."""
    return _C.is_forked()


# ---- modes and counters ------------------------------------------------------------------------------------


class eager_mode:  # noqa: N801 - reads as a function
    """When recorded operations are run: "debug" after each one, waiting for it; "strict" after each one;
    "fused" together, as one program, at natural boundaries.

    ``torch.tpu.eager_mode("strict")`` sets the mode for all threads of the process. As a context manager it
    is restored at the end. A process starts in fused mode with ``parts="first"``, or in the mode that the
    environment variable ``TPU_EAGER_MODE`` names.

    ``parts``, in fused mode: whether a long program is run in parts, which equal layers and their shares of
    the optimizer have in common. Parts compile sooner, and run somewhat slower than one program.

    - ``"never"``, the default here: always one program.
    - ``"first"``: in parts the first 256 times that a step is recorded alike. From the 32nd on a thread
      compiles the one program. Not under PyTorch's deterministic algorithms, since the last digits of sums
      may differ.
    - ``"prepare"``: in parts. From the second time on a thread compiles the one program, which runs when
      the mode is fused with ``parts="never"``.
    - ``"always"``: in parts.

    ``check_nans``, in debug mode: raise at the first operation whose result holds a NaN, naming it (default:
    as ``TPU_DEBUG_NANS=1`` says).

    Raises ValueError for an unknown mode or value of ``parts``, and for an option of another mode.
    """

    def __init__(self, mode: str, *, check_nans: bool | None = None, parts: str | None = None):
        if mode not in _MODES:
            raise ValueError(f"unknown eager mode {mode!r}: expected one of {', '.join(_MODES)}")
        if check_nans and mode != "debug":
            raise ValueError(f'check_nans=True looks at every op, which mode {mode!r} does not: use "debug"')
        if parts is not None and parts not in _PARTS:
            raise ValueError(f"unknown parts={parts!r}: expected one of {', '.join(_PARTS)}")
        if parts not in (None, "never") and mode != "fused":
            raise ValueError(f'parts={parts!r} in mode {mode!r}: only "fused" runs steps in parts')
        options = {"check_nans": check_nans, "parts": parts}
        self._said = ", ".join(
            [repr(mode), *(f"{name}={value!r}" for name, value in options.items() if value is not None)]
        )
        self._before = _C.get_mode(), _C.parts()
        self._checked_before = nan_check.enabled()
        if is_initialized():
            flush()
            _remember_line_of_mode()
        _set_mode(_MODES.index(mode), _PARTS.index(parts or "never"))
        if check_nans is not None:
            nan_check.enable(check_nans)

    def __repr__(self) -> str:
        return f"torch.tpu.eager_mode({self._said})"

    def __call__(self, *_: object) -> NoReturn:
        self.__exit__()
        raise TypeError(
            "torch.tpu.eager_mode is no decorator: write `with torch.tpu.eager_mode(...):` in the function"
        )

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        try:
            if is_initialized():
                flush()
                _remember_line_of_mode()
        finally:
            _set_mode(*self._before)
            nan_check.enable(self._checked_before)


class pad_sizes:  # noqa: N801 - reads as a function
    """Whether sizes that grow from call to call share padded programs, without gradients (docs/execution.md).

    The last digits of a result may then depend on which sizes came before. ``torch.tpu.pad_sizes(False)``
    switches it off, for all threads; as a context manager it is restored at the end. A process starts with
    it on, unless the environment variable ``TPU_PAD_SIZES`` is 0.
    """

    def __init__(self, enabled: bool):
        self._before = _C.pads_sizes()
        _set_pads_sizes(enabled)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        _set_pads_sizes(self._before)


def _set_pads_sizes(enabled: bool) -> None:
    if is_initialized() and enabled != _C.pads_sizes():
        flush()  # what was recorded before runs as it was meant to
    _C.set_pads_sizes(enabled)


def get_pad_sizes() -> bool:
    return _C.pads_sizes()


def _set_mode(mode: int, parts: int) -> None:
    _C.set_mode(mode)
    _C.set_parts(parts)


def _remember_line_of_mode() -> None:
    from tpu_backend.runtime.user_line import remember_line_of_mode

    remember_line_of_mode()


def get_eager_mode() -> str:
    """The mode that `eager_mode` has set: "debug", "strict" or "fused"."""
    return _MODES[_C.get_mode()]


def get_parts() -> str:
    """Whether long programs are run in parts, as `eager_mode` has set it."""
    return _PARTS[_C.parts()]


def compile_stats() -> dict[str, Any]:
    """Counters since the start: ops_recorded, segments_run, segments_in_parts (each of them several that were
    run), compilations, memory_hits, disk_hits, compile_seconds (that a program was waited for; threads
    may have compiled longer), host_reads, replays (of captured steps).  A
    program comes of a compilation or of a disk hit (`set_executable_cache`).
    """
    return _C.compile_stats(_C.current_device())


def compilations() -> list[Compilation]:
    """The last 256 programs that were compiled, oldest first, each with its operations, its seconds and its
    cause: what sets it apart from the nearest one before, and the Python line.  ``TPU_LOGS=compile`` prints
    them.
    """
    if not is_initialized():
        return []
    from tpu_backend.runtime import compile_log

    return compile_log.compilations()


def set_executable_cache(
    directory: str | os.PathLike[str] | None, *, max_bytes: int = executable_cache.MAX_BYTES
) -> None:
    """Keep compiled programs in a directory, where later processes find them; None: nowhere.

    Holds for programs that are needed from now on.  The environment variable ``TPU_CACHE_DIR`` says what a
    process starts with: a directory, or none (``none``); unset, ``~/.cache/tputrain/executables``.  Programs
    used least recently go first when there are more than `max_bytes` of them.  Many processes and hosts may
    share one.

    A directory that cannot be written, or that others could have written to, is said in one line on standard
    error; programs are then compiled as if there were none.  Raises ValueError for `max_bytes` below 1.
    """
    executable_cache.use(None if directory is None else Path(directory), max_bytes)


def get_executable_cache() -> Path | None:
    """The directory of `set_executable_cache`, absolute; None: there is none."""
    chosen = executable_cache.current()
    return None if chosen is None else chosen.directory


def capture(
    function: Callable[..., Any] | None = None,
    *,
    modules: Sequence[torch.nn.Module] = (),
    optimizers: Sequence[torch.optim.Optimizer] = (),
) -> Any:
    """A function of tensors, a whole training step say, whose Python is run until two calls were recorded
    alike; later calls launch the same program, from C++. Also a decorator.

    New in each call are tensors and floats among the arguments (in tuples, lists and dictionaries), the
    contents of every tensor it reads, its random numbers, and the numbers in an optimizer's
    `param_groups`. Tensors it returns require no gradient, but inside another captured function. It is
    recorded again when an argument has another shape, dtype or constant value, when a mode of PyTorch's
    changes, or a module or optimizer that it can reach does (`training`, parameters, buffers, hooks,
    settings, state); `modules` and `optimizers` name those that neither its tensors nor its arguments,
    closure, globals and `self` lead to. Whatever else its Python does is the caller's promise, as with
    `torch.cuda.graph`. What cannot be captured (``docs/compile.md``) is run by Python each time, which a
    warning says; `problem`, an attribute of what is returned, says why the last call was no replay. Where
    none of its tensors and parameters is on the device, it is run, too.

    Raises TypeError for an argument that is a tensor elsewhere while others, or a module, are on the device.
    """
    init()
    from tpu_backend.captured.step import capture as captured

    return captured(function, modules=modules, optimizers=optimizers)


@contextmanager
def rehearsal(device: Any = None) -> Iterator[None]:
    """What is recorded in here is compiled by threads and not run, so that later the same begins at once.
    At the end each tensor of the device that was there has the value that it had, and generators go on where
    they stood; a tensor that Python made meanwhile has no value. What Python changes beside tensors is not
    taken back, and what other threads record on the device in the meantime is rehearsed with it.
    `is_compiling_ahead` says when the threads are done.

    Raises RuntimeError inside another one, in a mode other than fused, for a read of what is computed in here
    (``item()``, ``print``, an operator that runs on the CPU), and for the resizing of a storage that was
    there; tensors have their values then, too.
    """
    if get_eager_mode() != "fused":
        raise RuntimeError(
            f"torch.tpu.rehearsal in mode {get_eager_mode()!r}: it prepares fused mode's programs"
        )
    init()
    index = _index(device)
    generator = get_rng_state(index)
    _C.begin_rehearsal(index)
    try:
        yield
        flush(index)
    finally:
        _C.end_rehearsal(index)
        set_rng_state(generator, index)


def is_compiling() -> bool:
    """Whether some thread of this process is compiling a program that is waited for; takes no lock."""
    return compiling.is_compiling()


def is_compiling_ahead() -> bool:
    """Whether threads are still compiling what a rehearsal or a step in parts has told them to."""
    if not is_initialized():
        return False
    from tpu_backend.runtime import ahead

    return ahead.is_busy()


def recent_ops() -> list[tuple[str, bool]]:
    """The operations recorded last (at most 32, oldest first), each with its tensors, and whether its program
    was launched.  Waits for no other thread: for a report on a process that hangs.
    """
    if not is_initialized():
        return []
    from tpu_backend.runtime.signature import signature

    numbers, num_pending = _C.recent_entries(_C.current_device())
    calls = [signature(number).described() for number in numbers]
    return [(call, position < len(calls) - num_pending) for position, call in enumerate(calls)]


def fallback_stats() -> dict[str, int]:
    """{operator: calls} that ran on the CPU for want of a lowering."""
    return _C.fallback_stats()


def reset_fallback_stats() -> None:
    _C.clear_fallback_stats()


def _cut_after_optimizer_steps() -> None:
    """An optimizer step ends the work of a step: the op after it begins a new program.

    The cut waits for that op, so that gradients dropped by ``zero_grad`` need not be outputs.
    """
    from torch.optim.optimizer import register_optimizer_step_post_hook

    def after_step(*_: object) -> None:
        if _C.is_initialized():
            _C.end_step(_C.current_device())

    # As torch.compiler.disable does, whose import takes a second: Dynamo calls it, and warns of no C++.
    after_step._torchdynamo_disable = True  # type: ignore[attr-defined]
    register_optimizer_step_post_hook(after_step)


def _keep_step_counts_on_the_host() -> None:
    """``torch.load(map_location="tpu")`` of an optimizer puts its step counts on the device, too, where
    PyTorch leaves them: each step would then read every one of them, and be several programs. They go back to
    where these optimizers make them.
    """
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    def before_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
        for group in optimizer.param_groups:
            if "foreach" not in group or group.get("fused") or group.get("capturable"):
                continue  # it is not PyTorch's, or counts on the device
            # They were loaded together: the first tells whether there is anything to do.
            states = (state for each in group["params"] if (state := optimizer.state.get(each)))
            for state in itertools.takewhile(lambda state: _is_on_tpu(state.get("step")), states):
                state["step"] = state["step"].cpu()

    before_step._torchdynamo_disable = True  # type: ignore[attr-defined]
    register_optimizer_step_pre_hook(before_step)


def _is_on_tpu(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "tpu"


# ---- memory ------------------------------------------------------------------------------------------------


def memory_allocated(device: Any = None) -> int:
    """Bytes that live tensors hold, a storage counted once."""
    return _C.memory_counters(_index(device))[0]


def max_memory_allocated(device: Any = None) -> int:
    return _C.memory_counters(_index(device))[1]


def memory_reserved(device: Any = None) -> int:
    """The same as `memory_allocated`: XLA keeps no cache of its own that a tensor could be given from."""
    return memory_allocated(device)


max_memory_reserved = max_memory_allocated


def reset_peak_memory_stats(device: Any = None) -> None:
    _C.reset_peak_memory(_index(device))


reset_max_memory_allocated = reset_peak_memory_stats


def ipc_collect() -> None:
    """Nothing: no memory is shared with other processes."""


def is_current_stream_capturing() -> bool:
    """Whether a graph is being captured, as CUDA does it; never: see `capture`."""
    return False


def memory_stats(device: Any = None) -> dict[str, int]:
    """Counters in bytes, under torch.cuda's names where it has them.

    ``executable_temp_bytes`` is what the hungriest compiled program needs beside the live buffers.
    """
    current, peak, allocations = _C.memory_counters(_index(device))
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
    """(free, total) bytes: of the chip where XLA tells, of the host where the device is the CPU."""
    index = _index(device)
    init()
    from tpu_backend.runtime.platform import platform

    stats = platform().devices[index].memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats["bytes_in_use"], stats["bytes_limit"]
    page = os.sysconf("SC_PAGE_SIZE")
    return os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page


def memory_summary(device: Any = None, abbreviated: bool = False) -> str:
    """The live tensors, those alike in one line: bytes, count, dtype, shape, the op and its Python line.
    There is nothing to abbreviate: the largest dozen kinds are listed.
    """
    index = _index(device)
    init()
    from tpu_backend.runtime.memory import describe_memory

    return describe_memory(index)


def empty_cache() -> None:
    """Nothing is cached beyond live tensors; this releases what Python's garbage still holds."""
    import gc

    gc.collect()


# ---- random numbers ----------------------------------------------------------------------------------------


class _DefaultGenerators:
    """One generator a device, made by the device itself."""

    def __len__(self) -> int:
        return device_count()

    def __getitem__(self, index: int) -> torch.Generator:
        if not 0 <= index < device_count():
            raise IndexError(f"tpu:{index} does not exist: {_how_many()}")
        return _C.default_generator(index)

    def __iter__(self) -> Iterator[torch.Generator]:
        return (self[index] for index in range(device_count()))


default_generators = _DefaultGenerators()


def manual_seed(seed: int) -> None:
    default_generators[current_device()].manual_seed(int(seed))


def manual_seed_all(seed: int) -> None:
    for generator in default_generators:
        generator.manual_seed(int(seed))


def seed() -> None:
    default_generators[current_device()].seed()


def seed_all() -> None:
    manual_seed_all(default_generators[0].seed())


def initial_seed() -> int:
    return default_generators[current_device()].initial_seed()


def get_rng_state(device: Any = "tpu") -> torch.Tensor:
    """The generator's (seed, offset) as a uint8 CPU tensor of 16 bytes."""
    return default_generators[_index(device)].get_state()


def get_rng_state_all() -> list[torch.Tensor]:
    return [generator.get_state() for generator in default_generators]


def set_rng_state(new_state: torch.Tensor, device: Any = "tpu") -> None:
    default_generators[_index(device)].set_state(new_state)


def set_rng_state_all(new_states: list[torch.Tensor]) -> None:
    for generator, state in zip(default_generators, new_states, strict=True):
        generator.set_state(state)


# ---- streams and events ------------------------------------------------------------------------------------


class Stream(torch.Stream):
    """The device's one stream.  Work on it is ordered, so waiting between streams holds by itself."""

    def __new__(cls, device: Any = None, priority: int = 0, **kwargs: Any) -> Stream:
        if "stream_id" in kwargs:
            return super().__new__(cls, **kwargs)
        return super().__new__(cls, device=torch.device("tpu", _index(device)), priority=priority)

    def wait_stream(self, stream: torch.Stream) -> None:
        pass


class _EventKind(type(torch.Event)):  # type: ignore[misc]
    """Makes a tpu event of ``torch.Event`` an instance of ``torch.tpu.Event``."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, torch.Event) and instance.device.type == "tpu"


class Event(torch.Event, metaclass=_EventKind):
    """An event on the device's stream: ``torch.Event`` on the tpu, under torch.cuda's name.

    Recording one runs nothing; ``query``, ``synchronize`` and ``elapsed_time`` run the work before it. With
    ``enable_timing`` that work ends a program, which is waited for when it runs: the time of the event is the
    moment it was done.
    """

    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> Any:
        # A torch.Event itself: its `elapsed_time` takes no subclass.
        return torch.Event(
            torch.device("tpu"), enable_timing=enable_timing, blocking=blocking, interprocess=interprocess
        )


def current_stream(device: Any = None) -> torch.Stream:
    return Stream(device)


def default_stream(device: Any = None) -> torch.Stream:
    return Stream(device)


def set_stream(stream: torch.Stream) -> None:
    _C.set_device(stream.device_index)


@contextmanager
def stream(stream: torch.Stream | None) -> Iterator[None]:
    """Context manager for code that names a stream; there is one a device, so the order of work does not
    change.
    """
    yield


_pad_sizes = os.environ.get("TPU_PAD_SIZES") or "1"
_C.set_pads_sizes(_pad_sizes == "1")
_first_mode = os.environ.get("TPU_EAGER_MODE") or None
if _first_mode in _MODES:
    eager_mode(_first_mode)
elif _first_mode is None:
    eager_mode("fused", parts="first")
executable_cache.use_environment()


def check_environment() -> None:
    """RuntimeError for a variable of unknown meaning: at first use, for `import torch` stays unharmed."""
    if _first_mode not in (None, *_MODES):
        raise RuntimeError(f"TPU_EAGER_MODE={_first_mode!r}: expected one of {', '.join(_MODES)}")
    if _pad_sizes not in ("0", "1"):
        raise RuntimeError(f"TPU_PAD_SIZES={_pad_sizes!r}: expected 1 (pad where it is proven) or 0 (never)")
    if (asked := os.environ.get("TPU_DEBUG_NANS", "0")) not in ("", "0", "1"):
        raise RuntimeError(f"TPU_DEBUG_NANS={asked!r}: expected 1 (debug mode raises at the first NaN) or 0")
