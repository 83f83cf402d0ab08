"""Kernels in Python made of other recorded operators, where PyTorch has one a device and no composite.

Those that an ordinary model calls many times a step are in C++ (csrc/composites.cpp, csrc/attention.cpp).
"""

from __future__ import annotations

from functools import cache

from torch.library import Library

from tpu_backend.composite import ctc, encoder, linalg, outputs
from tpu_backend.untraced import untraced

_KERNELS = linalg.KERNELS | ctc.KERNELS | encoder.KERNELS | outputs.KERNELS


@cache
def register() -> Library:
    """Give the device these kernels, for the life of the process. Idempotent."""
    library = Library("aten", "IMPL")
    for overload, kernel in _KERNELS.items():
        library.impl(overload, untraced(kernel), "PrivateUse1")
    return library
