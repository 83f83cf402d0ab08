"""Copies between tensors of one device, and values for buffers that were never written."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from tpu_backend.lowering.registry import lowering


@lowering("tpu::copy")
def copy(source: jax.Array, out: tuple[jax.ShapeDtypeStruct, ...]) -> jax.Array:
    """`source` broadcast to the target's shape; the cast is the table's."""
    return jnp.broadcast_to(source, out[0].shape)
