"""The two forms of a sparse matrix's row indices: one a value (COO), or where each row starts (CSR).

With R rows there are R + 1 of the latter: row r holds the values from ``starts[r]`` to ``starts[r + 1]``.
"""

from __future__ import annotations

import jax.numpy as jnp

from tpu_backend.lowering.registry import NotLoweredError, lowering


@lowering("_convert_indices_from_coo_to_csr")
def coo_to_csr(self, size, *, out_int32=False):
    return jnp.searchsorted(self, jnp.arange(size + 1), side="left")


@lowering("_convert_indices_from_csr_to_coo")
def csr_to_coo(crow_indices, col_indices, *, out_int32=False, transpose=False):
    if crow_indices.ndim > 1:
        raise NotLoweredError("a batch of matrices")
    places = jnp.arange(col_indices.shape[0])
    rows = (jnp.searchsorted(crow_indices, places, side="right") - 1).astype(col_indices.dtype)
    return jnp.stack([col_indices, rows] if transpose else [rows, col_indices])
