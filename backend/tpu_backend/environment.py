"""The environment variables that say how a process starts, and the names that they take."""

from __future__ import annotations

import os

from tpu_backend import _C

MODES = ("debug", "strict", "fused")  # as in csrc/record/stream.h
PARTS = ("never", "first", "prepare", "always")  # as in csrc/launch/program.h

FIRST_MODE = os.environ.get("TPU_EAGER_MODE") or None
PAD_SIZES = os.environ.get("TPU_PAD_SIZES") or "1"


def current_mode() -> str:
    """The eager mode of the process."""
    return MODES[_C.get_mode()]


def check_environment() -> None:
    """Raise RuntimeError for an unknown value of a variable: at first use, since `import torch` must work."""
    if FIRST_MODE not in (None, *MODES):
        raise RuntimeError(f"TPU_EAGER_MODE={FIRST_MODE!r}: expected one of {', '.join(MODES)}")
    if PAD_SIZES not in ("0", "1"):
        raise RuntimeError(f"TPU_PAD_SIZES={PAD_SIZES!r}: expected 1 (pad where it is proven) or 0 (never)")
    if (asked := os.environ.get("TPU_DEBUG_NANS", "0")) not in ("", "0", "1"):
        raise RuntimeError(f"TPU_DEBUG_NANS={asked!r}: expected 1 (debug mode raises at the first NaN) or 0")
