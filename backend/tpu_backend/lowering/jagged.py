"""Jagged rows to a padded tensor and back: what nested tensors of layout torch.jagged compute with.

Sequence ``b`` is ``values[offsets[b]:offsets[b + 1]]``.
"""

from __future__ import annotations

import jax.numpy as jnp

from tpu_backend.lowering.bounds import require_in_range
from tpu_backend.lowering.registry import NotLoweredError, lowering


def _one(offsets):
    if len(offsets) != 1:
        raise NotLoweredError("more than one jagged dimension")
    return offsets[0]


@lowering("_jagged_to_padded_dense_forward")
def jagged_to_padded(values, offsets, max_lengths, padding_value=0.0):
    """(sequences, max length, ...). What is longer is cut, as on the CPU."""
    offsets = _one(offsets)
    places = offsets[:-1, None] + jnp.arange(max_lengths[0], dtype=offsets.dtype)
    is_inside = (places < offsets[1:, None]).reshape(*places.shape, *(1,) * (values.ndim - 1))
    padding = jnp.asarray(padding_value).astype(values.dtype)
    if values.shape[0] == 0:
        return jnp.full((*places.shape, *values.shape[1:]), padding)
    return jnp.where(is_inside, values.at[places].get(mode="clip"), padding)


@lowering("_padded_dense_to_jagged_forward")
def padded_to_jagged(dense, offsets, total_L=None):
    """(total_L, ...), the rows before each sequence's padding."""
    offsets, name = _one(offsets), "_padded_dense_to_jagged_forward()"
    text = f"{name}: final offset should match total_L value"
    require_in_range(offsets[-1:], total_L, total_L + 1, RuntimeError, text)
    text = f"{name}: found batch item of length {{index}} when max length specified by padded input is "
    text += str(dense.shape[1])
    require_in_range(jnp.diff(offsets), 0, dense.shape[1] + 1, RuntimeError, text)
    rows = jnp.arange(total_L, dtype=offsets.dtype)
    sequence = jnp.searchsorted(offsets, rows, side="right") - 1
    return dense.at[sequence, rows - offsets[sequence]].get(mode="clip")
