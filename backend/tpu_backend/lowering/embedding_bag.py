"""embedding_bag and its gradients: rows of a table, summed, averaged or maximised bag by bag.

A position of ``indices`` belongs to the last bag that starts at or before it; positions whose index is
``padding_idx`` count for nothing.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from tpu_backend.lowering.bounds import require_in_range
from tpu_backend.lowering.registry import NotLoweredError, lowering

_SUM, _MEAN, _MAX = 0, 1, 2


def _bags(indices: jax.Array, offsets: jax.Array, num_bags: int) -> jax.Array:
    """The bag of every position; past the last bag where a closing offset ends before the end."""
    positions = jnp.arange(indices.shape[0], dtype=offsets.dtype)
    return jnp.clip(jnp.searchsorted(offsets, positions, side="right") - 1, 0, num_bags)


def _require_rows_and_bags(indices, offsets, num_rows):
    text = "embedding_bag: Expected idx >= 0 && idx < num_embeddings but found idx to be {index}"
    require_in_range(indices, 0, num_rows, RuntimeError, text)
    text = "offsets[0] has to be 0, i.e., the first sequence in the mini-batch has to start from position 0."
    require_in_range(offsets[:1], 0, 1, RuntimeError, f"{text} However, got {{index}}")
    count = indices.shape[0]
    text = f"offsets[-1] can not be greater than input's length {count} but got offsets[-1] of {{index}}"
    require_in_range(offsets[-1:], jnp.iinfo(offsets.dtype).min, count + 1, RuntimeError, text)


def _counted(indices, padding_idx):
    return jnp.ones(indices.shape, bool) if padding_idx < 0 else indices != padding_idx


def _sizes(counted, bags, num_bags, dtype):
    return jax.ops.segment_sum(counted.astype(dtype), bags, num_bags)


def _filled(value, spec):
    """An output that PyTorch gives a shape of its own, shorter, longer or empty; only we read it."""
    flat = value.astype(spec.dtype).reshape(-1)
    size = math.prod(spec.shape)
    return jnp.pad(flat[:size], (0, max(size - flat.shape[0], 0))).reshape(spec.shape)


@lowering(
    "_embedding_bag",
    "_embedding_bag_forward_only",
    promote="opmath",
    one_dtype=("weight", "per_sample_weights"),
)
def embedding_bag(
    weight,
    indices,
    offsets,
    scale_grad_by_freq=False,
    mode=_SUM,
    sparse=False,
    per_sample_weights=None,
    include_last_offset=False,
    padding_idx=-1,
    *,
    out,
):
    _require_rows_and_bags(indices, offsets, weight.shape[0])
    num_bags = out[0].shape[0]
    bags, counted = _bags(indices, offsets, num_bags), _counted(indices, padding_idx)
    rows = jnp.take(weight, indices, axis=0, mode="clip")
    sizes = _sizes(counted, bags, num_bags, jnp.int32)
    chosen = jnp.zeros(out[3].shape, out[3].dtype)
    if mode == _MAX:
        rows = jnp.where(counted[:, None], rows, -jnp.inf)
        largest = jax.ops.segment_max(rows, bags, num_bags)
        positions = jnp.arange(indices.shape[0])[:, None]
        of_largest = jnp.where(
            counted[:, None] & (rows == jnp.take(largest, bags, axis=0, mode="clip")), positions, len(indices)
        )
        first = jax.ops.segment_min(of_largest, bags, num_bags)
        if chosen.shape == first.shape and len(indices):
            chosen = jnp.take(indices, first, mode="clip")
        result = jnp.where(sizes[:, None] > 0, largest, 0)
    else:
        rows = jnp.where(counted[:, None], rows, 0)
        if per_sample_weights is not None:
            rows = rows * per_sample_weights[:, None]
        result = jax.ops.segment_sum(rows, bags, num_bags)
        if mode == _MEAN:
            result = result / jnp.maximum(sizes, 1)[:, None].astype(result.dtype)
    return result, _filled(bags, out[1]), _filled(sizes, out[2]), chosen


@lowering("_embedding_bag_backward", promote="opmath")
def embedding_bag_backward(
    grad,
    indices,
    offsets,
    offset2bag,
    bag_size,
    maximum_indices,
    num_weights,
    scale_grad_by_freq,
    mode,
    sparse,
    per_sample_weights,
    padding_idx=-1,
):
    if sparse:
        raise NotLoweredError("a sparse gradient")
    num_bags, width = grad.shape
    bags = _bags(indices, offsets, num_bags)
    counted = _counted(indices, padding_idx) & (bags < num_bags)
    sizes = _sizes(counted, bags, num_bags, grad.dtype)[:, None]
    zeros = jnp.zeros((num_weights, width), grad.dtype)
    if mode == _MAX:
        columns = jnp.broadcast_to(jnp.arange(width), grad.shape)
        return zeros.at[maximum_indices, columns].add(jnp.where(sizes > 0, grad, 0), mode="drop")
    if mode == _MEAN:
        grad = grad / jnp.maximum(sizes, 1)
    rows = jnp.take(grad, bags, axis=0, mode="clip")
    if per_sample_weights is not None:
        rows = rows * per_sample_weights[:, None]
    if scale_grad_by_freq:
        times = jnp.zeros(num_weights, grad.dtype).at[indices].add(1, mode="drop")
        rows = rows / jnp.take(times, indices, mode="clip")[:, None]
    return zeros.at[indices].add(jnp.where(counted[:, None], rows, 0), mode="drop")


@lowering("_embedding_bag_per_sample_weights_backward", promote="opmath")
def per_sample_weights_backward(grad, weight, indices, offsets, offset2bag, mode, padding_idx=-1):
    bags = _bags(indices, offsets, grad.shape[0])
    rows = jnp.take(weight, indices, axis=0, mode="clip")
    products = jnp.sum(jnp.take(grad, bags, axis=0, mode="clip") * rows, -1)
    return jnp.where(_counted(indices, padding_idx) & (bags < grad.shape[0]), products, 0)
