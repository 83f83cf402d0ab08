"""Where a chip is in its slice."""

from __future__ import annotations

from typing import Any

Place = tuple[int, int, int, int, int]
"""The slice, coordinates x, y, z, and the core, where a chip has several that are devices."""


def place_of(chip: Any) -> Place | None:
    """Of a device of JAX's; None for one that is no TPU."""
    if not hasattr(chip, "coords"):
        return None
    x, y, z = chip.coords
    return getattr(chip, "slice_index", 0), x, y, z, chip.core_on_chip
