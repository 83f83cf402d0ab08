"""Kernels in Python made of other recorded operators, where PyTorch has one a device and no composite.

Those that an ordinary model calls many times a step are in C++ (`composites.cpp`, `attention.cpp`).
"""

from __future__ import annotations

from functools import cache

from torch.library import Library

from tpu_backend.composite import ctc, encoder, linalg, outputs, sparse, sync_batch_norm
from tpu_backend.untraced import untraced

_DENSE = linalg.KERNELS | ctc.KERNELS | encoder.KERNELS | outputs.KERNELS | sync_batch_norm.KERNELS
_KERNELS = {
    "PrivateUse1": _DENSE,
    "SparsePrivateUse1": sparse.COO_KERNELS,
    "SparseCsrPrivateUse1": sparse.COMPRESSED_KERNELS,
}


@cache
def register() -> Library:
    """Give the device these kernels, for the life of the process. Idempotent."""
    library = Library("aten", "IMPL")
    for key, kernels in _KERNELS.items():
        for overload, kernel in kernels.items():
            library.impl(overload, untraced(kernel), key)
    return library
