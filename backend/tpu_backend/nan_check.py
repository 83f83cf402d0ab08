"""Whether debug mode looks for NaNs; the check itself is in runtime/debug.py, which needs JAX."""

from __future__ import annotations

import os

_enabled = os.environ.get("TPU_DEBUG_NANS", "0") == "1"


def enabled() -> bool:
    return _enabled


def enable(wanted: bool) -> None:
    global _enabled
    _enabled = wanted
