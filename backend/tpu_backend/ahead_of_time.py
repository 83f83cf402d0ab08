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
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from tpu_backend import _C

# What libtpu needs to be told where there is no TPU: it asks no metadata server, and holds no lock against a
# second process.
_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


def start(topology: str, rank: int = 0) -> None:
    """Make this process `rank` of a slice as JAX names it ("v5e:2x2"), alone: the other ranks are not there.

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


def recorded() -> list[dict[str, Any]]:
    """The segments that were recorded since `start`, or since this was asked last, oldest first."""
    from tpu_backend.runtime import described

    if described.here is None:
        raise RuntimeError("ahead_of_time.recorded: call ahead_of_time.start first")
    import torch

    torch.tpu.flush()  # type: ignore[attr-defined]
    segments, described.here.segments = described.here.segments, []
    return segments


def compile_for(topology: str, segment: dict[str, Any], options: Mapping[str, Any] | None = None) -> Any:
    """A recorded segment for the chips of a topology: a `jax.stages.Compiled`, which cannot run here.

    `options` are the compiler's, by name. Raises ValueError if the topology has another number of chips than
    the one that it was recorded for, and what JAX raises if it does not compile.
    """
    import jax

    from tpu_backend.runtime import described
    from tpu_backend.runtime.compiler import lower_segment
    from tpu_backend.runtime.target import target_for

    assert described.here is not None
    devices = chips(topology)
    if len(devices) != len(described.here.devices):
        raise ValueError(
            f"{topology} has {len(devices)} chips, and this was recorded for {len(described.here.devices)} "
            f"({described.here.name})"
        )
    lowered, _ = lower_segment(segment, target_for(segment, devices))
    with jax.enable_x64(True):
        return lowered.compile(compiler_options=None if options is None else dict(options))


@cache
def chips(topology: str) -> tuple[Any, ...]:
    """The chips of a topology, as libtpu describes them."""
    if find_spec("libtpu") is None:
        raise RuntimeError(
            "to compile for a TPU its compiler is needed: pip install 'tputrain[tpu]' (Linux on x86-64)"
        )
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    import jax
    from jax.experimental import topologies

    try:
        return tuple(topologies.get_topology_desc(platform="tpu", topology_name=topology).devices)
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(f"unknown topology {topology!r}: {str(error).splitlines()[0]}") from error
