"""The environment in which libtpu starts one process a device of a slice.

libtpu takes the whole host for one process unless variables say otherwise. They are those that JAX's own
tests and torch_xla set for one process a chip:

- https://github.com/jax-ml/jax/blob/main/jax/_src/test_multiprocess.py
- https://github.com/pytorch/xla/blob/master/torch_xla/_internal/tpu.py, `configure_topology`; there the two
  devices of a TPU7x chip are a fourth dimension of the process bounds
- https://gist.github.com/skye/f82ba45d2445bb19d53545538754f9a3

No slice has run with them here.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Bounds = tuple[int, int, int]

# What a user who arranges the processes himself sets.
_THE_USERS = ("TPU_PROCESS_BOUNDS", "TPU_VISIBLE_CHIPS", "TPU_VISIBLE_DEVICES", "CLOUD_TPU_TASK_ID")
_METADATA = "http://metadata.google.internal/computeMetadata/v1/instance/attributes/tpu-env"
_PATIENCE = 2.0  # seconds for the metadata server, which is on this machine


@dataclass(frozen=True)
class Slice:
    """How the chips of a slice are arranged: hosts along x, y, z, and the chips of a host along them."""

    hosts: Bounds
    chips: Bounds
    devices_per_chip: int = 1

    @property
    def devices_per_host(self) -> int:
        return math.prod(self.chips) * self.devices_per_chip

    @property
    def num_devices(self) -> int:
        return math.prod(self.hosts) * self.devices_per_host


# By accelerator type. For v4, v5p and TPU7x the number is one of cores: two a chip.
SLICES = {
    "v4-8": Slice((1, 1, 1), (2, 2, 1)),  # 2x2x1: https://cloud.google.com/tpu/docs/v4
    "v5litepod-8": Slice((1, 1, 1), (2, 4, 1)),  # 2x4: https://cloud.google.com/tpu/docs/v5e
    "v5litepod-16": Slice((2, 2, 1), (2, 2, 1)),  # 4x4, four VMs of ct5lp-hightpu-4t: the same page
    "v5p-16": Slice((1, 1, 2), (2, 2, 1)),  # 2x2x2, two hosts: https://cloud.google.com/tpu/docs/v5p
    "v6e-8": Slice((1, 1, 1), (2, 4, 1)),  # 2x4: https://cloud.google.com/tpu/docs/v6e
    "v6e-16": Slice((2, 2, 1), (2, 2, 1)),  # 4x4, four VMs of ct6e-standard-4t: the same page
    "tpu7x-8": Slice((1, 1, 1), (2, 2, 1), 2),  # 2x2x1: https://docs.cloud.google.com/tpu/docs/tpu7x
}
_ALSO_CALLED = {"v5e-8": "v5litepod-8", "v5e-16": "v5litepod-16"}


@dataclass(frozen=True)
class Place:
    """Where a rank is: its host and a free port there, and what its host is in the slice."""

    host: str
    port: int
    local_rank: int
    worker: int


def is_arranged_by_user() -> bool:
    """Whether the user has said himself which process has which chip."""
    return any(name in os.environ for name in _THE_USERS)


def facts() -> dict[str, str]:
    """What the platform says of the slice: by environment variables on GKE, else by the metadata server."""
    found = {
        name: value
        for name in ("ACCELERATOR_TYPE", "HOST_BOUNDS", "CHIPS_PER_HOST_BOUNDS", "WORKER_ID")
        if (value := os.environ.get(f"TPU_{name}"))
    }
    if "ACCELERATOR_TYPE" in found or "TPU_SKIP_MDS_QUERY" in os.environ:
        return found
    import urllib.request  # it imports much, and every process comes by this file

    request = urllib.request.Request(_METADATA, headers={"Metadata-Flavor": "Google"})
    try:
        with urllib.request.urlopen(request, timeout=_PATIENCE) as answer:
            text = answer.read().decode()
    except OSError:
        return found
    return dict(re.findall(r"^(\w+): '(.*)'$", text, re.MULTILINE)) | found


def slice_of(facts: Mapping[str, str], world_size: int) -> Slice:
    """The slice that the platform describes, of which the ranks are to be all devices.

    Raises RuntimeError if it is not described, or has another number of devices.
    """
    kind = facts.get("ACCELERATOR_TYPE", "")
    kind = _ALSO_CALLED.get(kind, kind)
    if "HOST_BOUNDS" in facts and "CHIPS_PER_HOST_BOUNDS" in facts:
        hosts, chips = _bounds(facts["HOST_BOUNDS"]), _bounds(facts["CHIPS_PER_HOST_BOUNDS"])
        found = Slice(hosts, chips, 2 if kind.startswith("tpu7x") else 1)
    elif kind in SLICES:
        found = SLICES[kind]
    else:
        raise RuntimeError(
            f"the topology of this TPU slice is unknown (TPU_ACCELERATOR_TYPE is {kind!r}): set "
            "TPU_HOST_BOUNDS and TPU_CHIPS_PER_HOST_BOUNDS, such as 1,1,1 and 2,4,1 for one host of 8 chips"
        )
    if found.num_devices != world_size:
        raise RuntimeError(
            f"this TPU slice ({kind or 'by its bounds'}) has {found.num_devices} devices on "
            f"{math.prod(found.hosts)} hosts, and the world has {world_size} ranks: start one rank a device"
        )
    return found


def _bounds(text: str) -> Bounds:
    numbers = [int(number) for number in text.split(",")]
    x, y, z = [*numbers, 1, 1][:3]
    return x, y, z


def environment_of(rank: int, slice_: Slice, places: Sequence[Place]) -> dict[str, str]:
    """What libtpu is told in the process of this rank; `places` has those of all ranks.

    Raises RuntimeError if the ranks are not in the physical order: host by host, and chip by chip.
    """
    for number, place in enumerate(places):
        physical = place.worker * slice_.devices_per_host + place.local_rank
        if physical != number:
            raise RuntimeError(
                f"rank {number} is device {place.local_rank} of TPU worker {place.worker} ({place.host}), "
                f"number {physical} of the slice: give the ranks the order of the workers, by "
                "torchrun --node-rank $TPU_WORKER_ID"
            )
    bounds = [host * chips for host, chips in zip(slice_.hosts, slice_.chips, strict=True)]
    if slice_.devices_per_chip > 1:
        bounds.append(slice_.devices_per_chip)
    return {
        "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1",
        "TPU_PROCESS_BOUNDS": ",".join(map(str, bounds)),
        "TPU_PROCESS_ADDRESSES": ",".join(f"{place.host}:{place.port}" for place in places),
        "TPU_PROCESS_PORT": str(places[rank].port),
        "TPU_VISIBLE_CHIPS": str(places[rank].local_rank),
        "CLOUD_TPU_TASK_ID": str(rank),
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # libtpu takes a lock for one process a host otherwise
    }
