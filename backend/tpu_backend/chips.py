"""The chips of this host, as files show them: without JAX, and without opening any."""

from __future__ import annotations

import os
from pathlib import Path

_GOOGLE = "0x1ae0"  # PCI vendor


def tpu_chips() -> list[Path]:
    """The device files of TPU chips on this host."""
    accelerators = sorted(Path("/dev").glob("accel[0-9]*"))
    return accelerators or sorted(filter(_is_googles, Path("/dev/vfio").glob("[0-9]*")))


def has_nvidia_gpu() -> bool:
    """Whether this host has an NVIDIA GPU, with its driver."""
    return Path("/dev/nvidiactl").exists()


def _is_googles(group: Path) -> bool:
    """Whether a VFIO group has a device of Google's: cards of others are passed through in the same way."""
    vendors = Path(f"/sys/kernel/iommu_groups/{group.name}/devices").glob("*/vendor")
    return any(vendor.read_text().strip() == _GOOGLE for vendor in vendors)


def is_tpu_wanted() -> bool:
    """Whether "tpu" stands for a TPU in this process, by `TPU_PLATFORM` and by what is there."""
    asked = os.environ.get("TPU_PLATFORM", "auto")
    return asked == "tpu" or (asked == "auto" and bool(tpu_chips()))
