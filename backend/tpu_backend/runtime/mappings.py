"""Memory mappings: XLA takes a dozen to 500 of them for each program that it loads on a CPU, and ends the
process where Linux has no more to give.
"""

from __future__ import annotations

from pathlib import Path

from tpu_backend.runtime.platform import platform

_MOST = Path("/proc/sys/vm/max_map_count")
_MAPS = Path("/proc/self/maps")
_SHORT_FROM = 0.75  # of them


def is_room_short() -> bool:
    """Whether few are left; False where programs take none, or nobody says how many there are."""
    if platform().name != "cpu":
        return False
    try:
        return _MAPS.read_bytes().count(b"\n") > _SHORT_FROM * int(_MOST.read_text())
    except OSError:
        return False
