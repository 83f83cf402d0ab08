"""What programs are compiled for.

A lowering, a key and a launch are told the target: a program may be compiled for a chip that this machine
does not have.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from tpu_backend.distributed import grids
from tpu_backend.lowering.collectives import AXIS
from tpu_backend.lowering.platforms import lowered_for
from tpu_backend.runtime import described
from tpu_backend.runtime.platform import platform
from tpu_backend.runtime.signature import summaries


@dataclass(frozen=True)
class Target:
    """An XLA platform, and the device that a program is placed on: one of this process, or one that a
    topology describes.
    """

    platform: str  # tpu, cuda or cpu
    device: Any
    mesh: Mesh | None = None  # of the devices of the ranks that run the program together
    groups: tuple[tuple[tuple[int, ...], tuple[str, ...]], ...] = ()  # of ranks, and its axes in the mesh
    ranks: tuple[int, ...] = ()  # in the world, in the order of the mesh

    @property
    def placement(self) -> SingleDeviceSharding | NamedSharding:
        """Where a program's arguments and results are. To JAX those of a mesh are one value on all of its
        devices; in truth each rank has its own.
        """
        if self.mesh is None:
            return SingleDeviceSharding(self.device)
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def num_ranks(self) -> int | None:
        """How many ranks run the program together; None: each by itself."""
        return None if self.mesh is None else int(self.mesh.devices.size)

    @property
    def devices(self) -> tuple[Any, ...]:
        return (self.device,) if self.mesh is None else tuple(self.mesh.devices.flat)


@cache
def target_of(index: int) -> Target:
    """The device of this process with this index, or the chip that this process stands for."""
    if described.here is not None:
        return Target("tpu", described.here.devices[described.here.rank])
    chosen = platform()
    return Target(chosen.name, chosen.devices[index])


def target_for(description: dict[str, Any], devices: tuple[Any, ...] | None = None) -> Target:
    """What a segment is compiled for: its device, or the mesh of the group of its collectives. Of these
    devices, one a rank, where they are given.

    Raises RuntimeError where it has collectives of groups that are not of one mesh.
    """
    target, rank = target_of(description["device"]), 0
    if described.here is not None:
        rank = described.here.rank
        devices = described.here.devices if devices is None else devices
        target = replace(target, device=devices[rank])
    names = (entry for entry, _, _ in summaries(description["tape"]) if entry.is_collective)
    groups = {tuple(entry.signature.ranks or ()) for entry in names}
    if not groups:
        return target
    if devices is None:
        rank = target.device.process_index
        devices = tuple(
            sorted(jax.devices(), key=lambda device: device.process_index)
        )  # each process has one
    return _of_groups(target, frozenset(groups), rank, devices)


@cache
def _of_groups(
    target: Target, groups: frozenset[tuple[int, ...]], own: int, by_rank: tuple[Any, ...]
) -> Target:
    if len(groups) == 1:
        (ranks,) = groups
        return replace(target, mesh=Mesh(np.array([by_rank[rank] for rank in ranks]), (AXIS,)), ranks=ranks)
    found = grids.grid_of(groups, own)
    if found is None:
        raise RuntimeError(
            f"a region has collectives of the groups {sorted(groups)}, and no single DeviceMesh contains "
            "them all: make them by torch.distributed.device_mesh.init_device_mesh"
        )
    grid, dims = found
    names = tuple(f"{AXIS}{dim}" for dim in range(grid.ndim))
    devices = np.array([by_rank[rank] for rank in grid.ravel()]).reshape(grid.shape)
    along = tuple((group, tuple(names[dim] for dim in dims[group])) for group in sorted(groups))
    return replace(target, mesh=Mesh(devices, names), groups=along, ranks=tuple(map(int, grid.ravel())))


def target_platform() -> str:
    """The platform that this thread lowers for; outside of a lowering, that of this process."""
    return lowered_for() or target_of(0).platform
