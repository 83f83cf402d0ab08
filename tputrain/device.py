"""The Trainer's view of a device: which one, in which mode, and the few things only the tpu device has.

Everything that asks "is this tpu?" is here; on any other device the same calls do what is natural there.
"""

import resource
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from tputrain.announce import say
from tputrain.errors import UserError

DEVICES = ("auto", "tpu", "cpu")
EXECUTABLE_CACHE = "~/.cache/tputrain/executables"


def find_device(name: str) -> torch.device:
    """The device a configuration names; `auto` is tpu, which is XLA on whatever this machine has."""
    if name == "cpu":
        return torch.device("cpu")
    try:
        from tpu_backend import register

        register()  # `import torch` has done so, or has said why not
    except ModuleNotFoundError:
        raise UserError(
            f"device={name}: tpu_backend is not installed; install it with `pip install .`, or set device=cpu"
        ) from None
    except (ImportError, RuntimeError) as error:
        raise UserError(f"device={name} cannot be loaded: {error}; or set device=cpu") from error
    return torch.device("tpu")


def open_device(device: torch.device) -> None:
    """Open it now rather than at its first use, so that what it says, or refuses, is said by itself."""
    if device.type == "tpu" and not torch.tpu.is_initialized():  # type: ignore[attr-defined]
        say("opening the device")
        torch.tpu.init()  # type: ignore[attr-defined]


def use_executable_cache(device: torch.device, chosen: str | None) -> None:
    """Keep compiled programs in the directory `chosen`, or nowhere (none); None: as the device does unasked,
    which is as TPU_CACHE_DIR says, or in EXECUTABLE_CACHE.
    """
    if device.type == "tpu" and chosen is not None:
        torch.tpu.set_executable_cache(None if chosen == "none" else chosen)  # type: ignore[attr-defined]


def describe_programs(device: torch.device) -> str | None:
    """How many programs this process compiled and how many it found; None where there is no such thing."""
    if device.type != "tpu":
        return None
    stats = torch.tpu.compile_stats()  # type: ignore[attr-defined]
    cache = torch.tpu.get_executable_cache()  # type: ignore[attr-defined]
    compiled = f"{stats['compilations']:,} compiled in {stats['compile_seconds']:.1f} s"
    return compiled if cache is None else f"{compiled}, {stats['disk_hits']:,} found in {cache}"


def describe(device: torch.device) -> str:
    """The device for people: `cpu`, or `tpu: XLA on TPU v5e`."""
    if device.type == "tpu":
        return f"tpu: XLA on {torch.tpu.get_device_name()}"  # type: ignore[attr-defined]
    return str(device)


def execution_mode(device: torch.device, mode: str, parts: str) -> AbstractContextManager[object]:
    """The context in which the device runs in `mode`, in parts or not (`torch.tpu.eager_mode`); elsewhere
    there is but one mode.
    """
    if device.type != "tpu":
        return nullcontext()
    return torch.tpu.eager_mode(mode, parts=parts)  # type: ignore[attr-defined]


def exact_sizes(device: torch.device) -> AbstractContextManager[object]:
    """The context in which each size has a program of its own: a padded one's last digits depend on the sizes
    that this process met before, and a resumed run has met others.
    """
    if device.type != "tpu":
        return nullcontext()
    return torch.tpu.pad_sizes(False)  # type: ignore[attr-defined]


def autocast(device: torch.device, dtype: str | None) -> AbstractContextManager[object]:
    """The context in which a forward pass computes in `dtype` where PyTorch's lists say that it may."""
    return nullcontext() if dtype is None else torch.autocast(device.type, getattr(torch, dtype))


def computed_again(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The same values, but what is computed from them is not taken for what was computed before.

    A compiler that sees a whole step keeps the first result instead of computing it twice; where memory is
    what counts, that is the wrong choice. Nothing computed from one of them begins before all are there.
    """
    if tensors[0].device.type != "tpu":
        return tensors
    return _optimization_barrier()(*tensors)


def computed_before(tensor: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
    """The same values as `tensor`. On XLA's CPU nothing is computed from them before `others` are there: its
    schedule puts off what nothing waits for, and keeps in memory all that this is computed from.
    """
    return _after_others()(tensor, *others) if tensor.device.type == "tpu" and others else tensor


def held_by_host(tensor: torch.Tensor) -> torch.Tensor:
    """The same values. On a TPU the host keeps them until they are used, in the same program."""
    if tensor.device.type != "tpu":
        return tensor
    from tpu_backend import held_by_host

    return held_by_host(tensor)


def taken_from_host(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """As `computed_again`, for what `held_by_host` has given."""
    if tensors[0].device.type != "tpu":
        return tensors
    from tpu_backend import taken_from_host

    return taken_from_host(*tensors)


@cache
def _optimization_barrier() -> Callable[..., tuple[torch.Tensor, ...]]:
    from jax import lax

    from tpu_backend import jax_op
    from tpu_backend.barrier import kept_after

    def kept_apart(*arrays: Any) -> tuple[Any, ...]:
        # XLA:CPU removes barriers before it looks for what is computed twice.
        return lax.platform_dependent(
            arrays, cpu=kept_after, default=lambda arrays: tuple(lax.optimization_barrier(arrays))
        )

    return jax_op(kept_apart, name="optimization_barrier")


@cache
def _after_others() -> Callable[..., torch.Tensor]:
    from jax import lax

    from tpu_backend import jax_op
    from tpu_backend.barrier import kept_after

    def after(*arrays: Any) -> Any:
        return lax.platform_dependent(
            arrays, cpu=lambda each: kept_after(each)[0], default=lambda each: each[0]
        )

    return jax_op(after, name="computed_before")


def linear_cross_entropy() -> Callable[..., torch.Tensor]:
    """The tpu device's, which makes no whole logits."""
    from tpu_backend import linear_cross_entropy

    return linear_cross_entropy


def logits_of_loss(hidden: torch.Tensor, weight: torch.Tensor, has_gradient: bool) -> int:
    """How many logits of `linear_cross_entropy` a TPU has in memory at a time, at most.

    `has_gradient`: of the weight.
    """
    from tpu_backend.lowering.linear_cross_entropy import tokens_of_block_on_tpu

    classes, features = weight.shape
    return classes * tokens_of_block_on_tpu(hidden.element_size(), classes, features, has_gradient)


def document_attention() -> Callable[..., torch.Tensor]:
    """The tpu device's, which makes no mask of documents."""
    from tpu_backend import document_attention

    return document_attention


def attention_scores(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, has_dropout: bool
) -> int | None:
    """How many scores of this attention a TPU has in memory at a time, at most, however many ranks share its
    heads; 0 where it is a kernel. None: all of them.
    """
    from tpu_backend.attention import MOST_TOGETHER, block_of_scores, is_kernel_on_tpu

    shapes = query.shape, key.shape, value.shape
    bias = None if mask is None else (mask.shape, str(mask.dtype))
    if not has_dropout and is_kernel_on_tpu(*shapes, str(query.dtype), bias):
        return 0
    batch, heads, queries, _ = query.shape
    keys = key.shape[2]
    sequences, rows = block_of_scores(batch, heads, queries, keys)
    if (sequences, rows) == (batch, queries):
        return None
    return max(sequences * heads * rows * keys, MOST_TOGETHER)  # so many a rank of few heads has together


def padded_length(length: int) -> int:
    """Queries or keys that a kernel of attention computes on a TPU, for so many that there are."""
    from tpu_backend.attention import padded_length

    return padded_length(length)


def failure_of_peers(seconds: float) -> str | None:
    """Which rank failed, and why, as soon as the device knows it; None: it does not, after `seconds`."""
    from tpu_backend.distributed.peers import failure_of_peers

    return failure_of_peers(seconds)


def flush(device: torch.device) -> None:
    """Dispatch everything recorded so far as one program, without waiting for it."""
    if device.type == "tpu":
        torch.tpu.flush()  # type: ignore[attr-defined]


def captured(function: Callable[..., Any], modules: Sequence[nn.Module], optimizer: Optimizer) -> Any:
    """A step of these that the tpu device replays without its Python once it was recorded twice alike."""
    return torch.tpu.capture(function, modules=modules, optimizers=[optimizer])  # type: ignore[attr-defined]


def region(function: Callable[..., Any], modules: Sequence[nn.Module], optimizer: Optimizer) -> Any:
    """A step of these that is one program, with its collectives, and the same one on all ranks."""
    return torch.tpu.spmd(function, modules=modules, optimizers=[optimizer])  # type: ignore[attr-defined]


def use_meta_kernels() -> None:
    """Have tensors without values get the shapes that the tpu device gives, and its loss over a vocabulary
    run on them; the device need not be opened.
    """
    from tpu_backend import vocabulary_loss
    from tpu_backend.runtime.shapes import register_meta_kernels

    register_meta_kernels()
    vocabulary_loss.register()


def source_directory() -> Path:
    """Where the device's own Python files are."""
    import tpu_backend

    return Path(tpu_backend.__file__).parent


def of_slices() -> Any:
    """What the device does for slices that are not here: `tpu_backend.ahead_of_time`."""
    from tpu_backend import ahead_of_time

    return ahead_of_time


def program_of(text: str) -> Any:
    """A compiled program's text, parsed: a `tpu_backend.hlo.Program`."""
    from tpu_backend import hlo

    return hlo.program(text)


def is_absent() -> bool:
    """Whether this process stands for one rank of a slice that is not here, and only records."""
    module = sys.modules.get("tpu_backend.ahead_of_time")
    return module is not None and module.is_started()


def peers() -> Any:
    """What this rank knows of the others (`Peers` of the device); None in a process that is alone."""
    module = sys.modules.get("tpu_backend.distributed.peers")
    return None if module is None else module.world


def tell_ranks(error: BaseException) -> None:
    """Tell the other ranks that this one ends, and of what."""
    if (world := peers()) is not None:
        world.publish(f"{type(error).__name__}: {error}")


def is_compiling_ahead(device: torch.device) -> bool:
    """Whether threads are still compiling the program that follows steps in parts."""
    return device.type == "tpu" and torch.tpu.is_compiling_ahead()  # type: ignore[attr-defined]


def compilations(device: torch.device) -> int:
    """Programs compiled by this process so far."""
    return torch.tpu.compile_stats()["compilations"] if device.type == "tpu" else 0  # type: ignore[attr-defined]


def causes_of_compilations(device: torch.device) -> dict[int, str]:
    """Why the last 256 programs were compiled, by their numbers: what changed, and the Python line."""
    if device.type != "tpu":
        return {}
    programs = torch.tpu.compilations()  # type: ignore[attr-defined]
    return {program.number: str(program.cause) for program in programs}


def disk_hits(device: torch.device) -> int:
    """Programs that this process found in the executable cache so far."""
    return torch.tpu.compile_stats()["disk_hits"] if device.type == "tpu" else 0  # type: ignore[attr-defined]


def is_compiling(device: torch.device) -> bool:
    """Whether some thread of this process is compiling a program right now; waits for nothing."""
    return device.type == "tpu" and torch.tpu.is_compiling()  # type: ignore[attr-defined]


def recent_ops(device: torch.device) -> list[str]:
    """The operations that the device recorded last, a line each, oldest first. Waits for nothing."""
    if device.type != "tpu":
        return []
    recent = torch.tpu.recent_ops()  # type: ignore[attr-defined]
    return [f"{'launched' if launched else 'waiting '}  {call}" for call, launched in recent]


def describe_counters(device: torch.device) -> str:
    """How far the device's stream has come, for a report on a hang. May wait for whoever holds the stream."""
    if device.type != "tpu":
        return f"{device}: runs in the threads above"
    return f"{device}: {torch.tpu.compile_stats()}"  # type: ignore[attr-defined]


def peak_memory(device: torch.device) -> int:
    """Bytes: the most that was allocated on the device; on the cpu, the most this process held."""
    if device.type == "tpu":
        return torch.tpu.max_memory_allocated()  # type: ignore[attr-defined]
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts KiB


def memory(device: torch.device) -> int:
    """Bytes: what is allocated on the device now; on the cpu, what this process holds."""
    if device.type == "tpu":
        return torch.tpu.memory_allocated()  # type: ignore[attr-defined]
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def chip_name(device: torch.device) -> str | None:
    """The chip behind the tpu device, as XLA names it; None elsewhere."""
    return torch.tpu.get_device_name() if device.type == "tpu" else None  # type: ignore[attr-defined]


def place(device: torch.device) -> tuple[int, ...] | None:
    """Of this process's chip: its slice, coordinates x, y, z, and the core; None where it is no TPU."""
    if device.type != "tpu":
        return None
    from tpu_backend.runtime.places import place_of
    from tpu_backend.runtime.target import target_of

    return place_of(target_of(0).device)


def rng_state(device: torch.device) -> torch.Tensor | None:
    """The device generator's state (uint8), or None where the cpu's generator is the only one."""
    return torch.tpu.get_rng_state() if device.type == "tpu" else None  # type: ignore[attr-defined]


def seed_device(device: torch.device, seed: int) -> None:
    """Seed the device's generator alone."""
    if device.type == "tpu":
        torch.tpu.manual_seed(seed)  # type: ignore[attr-defined]


def set_rng_state(device: torch.device, state: torch.Tensor) -> None:
    """Put back what `rng_state` gave."""
    torch.tpu.set_rng_state(state)  # type: ignore[attr-defined]
