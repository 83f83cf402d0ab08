"""The bytes of an array read as another dtype: what ``Tensor.view(dtype)`` is on a device without pointers.

Bytes are little-endian, as on every platform XLA runs on.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def reinterpret(array: jax.Array, dtype: np.dtype) -> jax.Array:
    """The elements of `dtype` that the row-major bytes of `array` spell.

    Leading dims stay where that is possible: a narrower dtype splits each element along a new last dim, a
    wider one groups the last dim, or the flattened array where the last dim does not divide; bytes left over
    at its end are then not part of the result.  Any non-zero byte read as bool is True.
    """
    dtype = np.dtype(dtype)
    if array.dtype == dtype:
        return array
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        return reinterpret(jnp.stack([lax.real(array), lax.imag(array)], axis=-1), dtype)
    if array.dtype == jnp.bool_:
        return reinterpret(array.astype(jnp.uint8), dtype)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        parts = _grouped(reinterpret(array, np.dtype(f"float{dtype.itemsize * 4}")), 2)
        return lax.complex(parts[..., 0], parts[..., 1])
    if dtype == jnp.bool_:
        return reinterpret(array, np.dtype(np.uint8)) != 0
    if dtype.itemsize > array.dtype.itemsize:
        array = _grouped(array, dtype.itemsize // array.dtype.itemsize)
    return lax.bitcast_convert_type(array, dtype)


def restore(array: jax.Array, like: jax.Array) -> jax.Array:
    """The inverse: an array once made by ``reinterpret(like, ...)`` with the dtype and shape of `like` again.

    Bytes of `like` that the other dtype could not reach keep their values.
    """
    array = reinterpret(array, like.dtype)
    if array.size < like.size:
        tail = like.reshape(-1)[array.size :]
        array = jnp.concatenate([array.reshape(-1), tail])
    return array.reshape(like.shape)


def _grouped(array: jax.Array, count: int) -> jax.Array:
    """`array` with `count` neighbours along a new last dim, without the elements that do not fill a group."""
    if array.ndim and array.shape[-1] % count == 0:
        return array.reshape(*array.shape[:-1], array.shape[-1] // count, count)
    groups = array.size // count
    return array.reshape(-1)[: groups * count].reshape(groups, count)
