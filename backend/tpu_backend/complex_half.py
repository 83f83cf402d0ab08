"""complex32, which JAX does not have: a buffer holds its bits as uint32, lowerings see complex64.

PyTorch's own kernels compute in complex64 as well, and round once.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import torch
from jax import lax

from tpu_backend.reinterpret import reinterpret


def decode(array: jax.Array, dtype: torch.dtype) -> jax.Array:
    """What a lowering sees of the array of a buffer that is read as this dtype."""
    if dtype is not torch.complex32:
        return array
    parts = reinterpret(array, jnp.dtype(jnp.float16)).astype(jnp.float32)
    return lax.complex(parts[..., 0], parts[..., 1])


def encode(array: jax.Array, dtype: torch.dtype) -> jax.Array:
    """The inverse: as a buffer of this dtype holds it, each part rounded to float16."""
    if dtype is not torch.complex32:
        return array
    parts = jnp.stack([lax.real(array), lax.imag(array)], axis=-1).astype(jnp.float16)
    return lax.bitcast_convert_type(parts, jnp.uint32)
