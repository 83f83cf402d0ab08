"""JAX's factorisations, one matrix of a batch after the other where the device is a CPU.

There jaxlib's kernels hand the matrices of a batch to the threads of XLA's pool, and wait for them in one of
these threads. When as many factorisations are under way as there are threads, all of them wait for ever
(jaxlib 0.10; two triangular systems in one program on two cores). One matrix takes no other thread.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def _one_by_one(function: Callable[..., Any], *arrays: jax.Array) -> Any:
    """``function`` of matrices that may stand in batches; all arrays have the same batch dimensions."""
    batch = arrays[0].shape[:-2]
    count = math.prod(batch)
    if count <= 1 or arrays[0].size == 0:
        return function(*arrays)

    def each_alone(*arrays: jax.Array) -> Any:
        flat = tuple(array.reshape(count, *array.shape[len(batch) :]) for array in arrays)
        results = lax.map(lambda matrices: function(*matrices), flat)
        return jax.tree.map(lambda result: result.reshape(*batch, *result.shape[1:]), results)

    return lax.platform_dependent(*arrays, cpu=each_alone, default=function)


def cholesky(matrices: jax.Array) -> jax.Array:
    """The lower factor; the upper half is not looked at."""
    return _one_by_one(partial(jnp.linalg.cholesky, symmetrize_input=False), matrices)


def qr(matrices: jax.Array, mode: str = "reduced") -> Any:
    return _one_by_one(lambda matrix: _plain(jnp.linalg.qr(matrix, mode=mode)), matrices)


def eigh(matrices: jax.Array, half: str) -> tuple[jax.Array, jax.Array]:
    """Eigenvalues and vectors; ``half``, L or U, is the one that is looked at."""
    function = partial(jnp.linalg.eigh, UPLO=half, symmetrize_input=False)
    return _one_by_one(lambda matrix: _plain(function(matrix)), matrices)


def eigvalsh(matrices: jax.Array, half: str) -> jax.Array:
    return _one_by_one(partial(jnp.linalg.eigvalsh, UPLO=half, symmetrize_input=False), matrices)


def svd(matrices: jax.Array, full_matrices: bool = True, compute_uv: bool = True) -> Any:
    function = partial(jnp.linalg.svd, full_matrices=full_matrices, compute_uv=compute_uv)
    return _one_by_one(lambda matrix: _plain(function(matrix)), matrices)


def lu(matrices: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Both factors in one matrix, pivots from 0, the permutation."""
    return _one_by_one(lambda matrix: tuple(lax.linalg.lu(matrix)), matrices)


def triangular_solve(matrices: jax.Array, right: jax.Array, **options: bool) -> jax.Array:
    """`lax.linalg.triangular_solve`, with its options."""
    return _one_by_one(partial(lax.linalg.triangular_solve, **options), matrices, right)


def householder_product(reflectors: jax.Array, scales: jax.Array) -> jax.Array:
    return _one_by_one(lax.linalg.householder_product, reflectors, scales)


def _plain(results: Any) -> Any:
    """A named tuple as a tuple: those of two branches must be of one type."""
    return tuple(results) if isinstance(results, tuple) else results
