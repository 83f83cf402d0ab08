"""What programs are compiled for.

A lowering, a key and a launch are told the target: a program may be compiled for a chip that this machine
does not have.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from jax.sharding import SingleDeviceSharding

from tpu_backend.lowering.platforms import lowered_for
from tpu_backend.runtime.platform import platform


@dataclass(frozen=True)
class Target:
    """An XLA platform, and the device that a program is placed on: one of this process, or one that a
    topology describes.
    """

    platform: str  # tpu, cuda or cpu
    device: Any

    @property
    def placement(self) -> SingleDeviceSharding:
        """Where a program's arguments and results are."""
        return SingleDeviceSharding(self.device)


@cache
def target_of(index: int) -> Target:
    """The device of this process with this index."""
    chosen = platform()
    return Target(chosen.name, chosen.devices[index])


def target_platform() -> str:
    """The platform that this thread lowers for; outside of a lowering, that of this process."""
    return lowered_for() or target_of(0).platform
