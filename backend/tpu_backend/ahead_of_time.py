"""Compile for a TPU slice that is not here.

`start` makes this process one rank of the slice: it records what that rank would launch, and runs nothing.
`compile_for` has libtpu compile such a program; it needs no TPU.

    ahead_of_time.start("v5e:2x2")
    ...                                             # model, fully_shard, a step in torch.tpu.spmd
    step(x, y)
    compiled = ahead_of_time.compile_for("v5e:2x2", ahead_of_time.recorded()[-1])
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from packaging.requirements import Requirement
from torch._C._distributed_c10d import HashStore

from tpu_backend import _C

if TYPE_CHECKING:
    from tpu_backend.runtime.places import Place

# What libtpu needs to be told where there is no TPU: it asks no metadata server, and holds no lock against a
# second process.
_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_HOST_BOUNDS": "1,1,1",  # else it says that it does not know them
}


def start(topology: str, rank: int = 0) -> None:
    """Make this process `rank` of a slice ("v5e:2x2", or "2x v5e:16x16" for two that DCN connects), alone:
    the other ranks are not there.

    The world has a rank a chip. From here on tensors of the device have shapes and no values. To be called
    before the device is used, and instead of `init_process_group`.

    Raises RuntimeError if the device or a process group was used before, or if libtpu is not installed;
    ValueError for an unknown topology, or a rank outside it.
    """
    from tpu_backend.distributed import peers
    from tpu_backend.distributed.absent import AbsentPeers
    from tpu_backend.runtime import described

    if _C.is_initialized() or dist.is_initialized():
        raise RuntimeError(
            "ahead_of_time.start: this process has used the tpu device or a process group before; call it "
            "first, in a process of its own"
        )
    devices = chips(topology)
    if not 0 <= rank < len(devices):
        raise ValueError(f"rank={rank}: {topology} has the ranks 0 to {len(devices) - 1}")
    described.here = described.Slice(topology, devices, rank)
    peers.world = AbsentPeers(rank, len(devices))
    dist.init_process_group("tpu", store=HashStore(), rank=rank, world_size=len(devices))
    # A DeviceMesh warns where the device is not chosen by then, and chooses one.
    torch.tpu.init()  # type: ignore[attr-defined]


def is_started() -> bool:
    """Whether this process stands for a rank of a slice that is not here."""
    from tpu_backend.runtime import described

    return described.here is not None


def is_read(error: Exception) -> bool:
    """Whether the error says that a value was asked for, which is not there."""
    from tpu_backend.runtime.described import NO_VALUE

    return NO_VALUE in str(error)


def mark(label: str) -> None:
    """Give what is recorded from here on a name, which the compiled program's metadata has."""
    _here().mark(label)


def recorded() -> list[dict[str, Any]]:
    """The segments that were recorded since `start`, or since this was asked last, oldest first."""
    here = _here()
    torch.tpu.flush()  # type: ignore[attr-defined]
    segments, here.segments = here.segments, []
    return segments


def _here() -> Any:
    from tpu_backend.runtime import described

    if described.here is None:
        raise RuntimeError("ahead_of_time: call ahead_of_time.start first")
    return described.here


def lower_for(topology: str, segment: Mapping[str, Any], order: Sequence[int] | None = None) -> Any:
    """A recorded segment as a program for the chips of a topology: a `jax.stages.Lowered`.

    Starts of slices are constants in it: all ranks have the same ones, or the programs of two ranks differ.
    `order`: of each rank its chip, by its place in `chips(topology)`; None: in that order. Raises ValueError
    if the topology has another number of chips than the one that the segment was recorded for.
    """
    from tpu_backend.runtime.compiler import lower_segment
    from tpu_backend.runtime.target import target_for

    here, devices = _here(), chips(topology)
    if len(devices) != len(here.devices):
        raise ValueError(
            f"{topology} has {len(devices)} chips, and this was recorded for {len(here.devices)} "
            f"({here.name})"
        )
    if order is not None:
        devices = tuple(devices[place] for place in order)
    constant = dict(segment) | {"offset_is_input": [False] * len(segment["offsets"])}
    lowered, _ = lower_segment(constant, target_for(constant, devices))
    return lowered


def compile_for(
    topology: str,
    segment: Mapping[str, Any],
    options: Mapping[str, Any] | None = None,
    order: Sequence[int] | None = None,
) -> Any:
    """A recorded segment for the chips of a topology (see `lower_for`): a `jax.stages.Compiled`, which cannot
    run here.

    `options` are the compiler's, by name; None: those that a run on these chips takes. Raises what JAX raises
    if it does not compile.
    """
    import jax

    from tpu_backend.runtime.compiler_options import options_for
    from tpu_backend.runtime.target import target_for

    lowered = lower_for(topology, segment, order)
    if options is None:
        options = options_for(dict(segment), target_for(dict(segment), chips(topology)))
    with jax.enable_x64(True):
        return lowered.compile(compiler_options=None if options is None else dict(options))


@cache
def chips(topology: str) -> tuple[Any, ...]:
    """The chips of a topology, as libtpu describes them, slice by slice."""
    if find_spec("libtpu") is None:
        raise RuntimeError(
            "to compile for a TPU its compiler is needed: pip install 'tputrain[tpu]' (Linux on x86-64)"
        )
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    import jax
    from jax.experimental import topologies

    slices, _, name = topology.rpartition("x ")
    arguments: dict[str, Any] = {"topology_name": name}
    if slices:
        arguments["num_slices"] = int(slices)
    if set(name.partition(":")[2]) == {"1", "x"}:
        arguments["chips_per_host_bounds"] = (1, 1, 1)  # else a host has four at least
    if name.startswith("v4:"):
        arguments["chip_config_name"] = "megacore"  # as a run has it: both cores of a chip are one device
    try:
        return tuple(topologies.get_topology_desc(platform="tpu", **arguments).devices)
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).splitlines()[0]
        if (differs := mismatch()) is not None:
            raise RuntimeError(f"{differs}; with these versions: {reason}") from error
        raise ValueError(f"unknown topology {topology!r}: {reason}") from error


def places(topology: str) -> list[Place]:
    """Of each chip in `chips(topology)` where it is."""
    from tpu_backend.runtime.places import place_of

    return [place for each in chips(topology) if (place := place_of(each)) is not None]


def compiler_version() -> str | None:
    """Of libtpu; None where it is not installed."""
    try:
        return version("libtpu")
    except PackageNotFoundError:
        return None


def mismatch() -> str | None:
    """How the installed libtpu differs from the one that the installed jax asks for, and what to type; None:
    it does not. Another libtpu may compile, too.
    """
    installed, jax = compiler_version(), version("jax")
    for each in map(Requirement, requires("jax") or ()):
        is_asked = each.marker is None or each.marker.evaluate({"extra": "tpu"})
        if each.name == "libtpu" and is_asked and installed is not None and installed not in each.specifier:
            return (
                f"jax {jax} asks for libtpu{each.specifier}, and libtpu {installed} is installed: "
                f"pip install 'jax[tpu]=={jax}'"
            )
    return None
