"""segment_reduce: reductions over consecutive runs of one axis, given by their lengths or by their ends."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from tpu_backend.lowering.registry import is_16_bit, lowering, opmath, stored

_START = {"sum": 0, "mean": 0, "prod": 1, "max": -math.inf, "min": math.inf}
_METHOD = {
    "sum": "add",
    "mean": "add",
    "prod": "multiply",
    "max": "max",
    "min": "min",
}  # of an indexed update


def _rows(value: jax.Array, axis: int) -> jax.Array:
    """(batch, the axis, everything after it)."""
    return value.reshape(math.prod(value.shape[:axis]), value.shape[axis], -1)


def _segments(lengths, offsets, axis, size):
    """The segment of every position, (batch, size), one past the last where none; and the segments' sizes."""
    if offsets is None:
        sizes = lengths.reshape(-1, lengths.shape[-1])
        bounds = jnp.pad(jnp.cumsum(sizes, -1), ((0, 0), (1, 0)))
    else:
        bounds = offsets.reshape(-1, offsets.shape[-1])
        sizes = jnp.diff(bounds, axis=-1)
    positions = jnp.arange(size, dtype=bounds.dtype)
    count = sizes.shape[-1]
    place = jax.vmap(lambda row: jnp.searchsorted(row, positions, side="right") - 1)(bounds)
    return jnp.where(place < 0, count, jnp.minimum(place, count)), sizes


def _start(reduce, initial, dtype):
    return jnp.asarray(_START[reduce] if initial is None else initial).astype(dtype)


@lowering("segment_reduce")  # in the dtype of the data, also in 16 bit, as on the CPU
def segment_reduce(
    data, reduce, *, lengths=None, indices=None, offsets=None, axis=0, unsafe=False, initial=None, out
):
    axis = axis % data.ndim
    rows = _rows(data, axis)
    segments, sizes = _segments(lengths, offsets, axis, data.shape[axis])
    count = sizes.shape[-1]
    start = _start(reduce, initial, data.dtype)
    begun = jnp.full((count, rows.shape[-1]), start)
    result = jax.vmap(lambda row, segment: getattr(begun.at[segment], _METHOD[reduce])(row, mode="drop"))(
        rows, segments
    )
    if reduce == "mean":
        sizes = sizes[..., None]
        empty = jnp.nan if initial is None else start
        wide = opmath(data.dtype)
        result = jnp.where(sizes > 0, result.astype(wide) / jnp.maximum(sizes, 1).astype(wide), empty)
    return result.reshape(out[0].shape)


@lowering("_segment_reduce_backward", promote="opmath")
def segment_reduce_backward(
    grad, output, data, reduce, *, lengths=None, offsets=None, axis=0, initial=None, out
):
    axis = axis % data.ndim
    rows = _rows(data, axis)
    segments, sizes = _segments(lengths, offsets, axis, data.shape[axis])
    count = sizes.shape[-1]

    def spread(per_segment):
        return jax.vmap(lambda row, segment: jnp.take(row, segment, axis=0, mode="fill", fill_value=0))(
            per_segment, segments
        )

    def total(values):
        return jax.vmap(lambda row, segment: jax.ops.segment_sum(row, segment, count))(values, segments)

    incoming = spread(_rows(grad, axis))
    if reduce == "mean":
        incoming = incoming / jnp.maximum(spread(sizes[..., None]), 1).astype(data.dtype)
    elif reduce in ("max", "min"):
        reduced = spread(_rows(output, axis))
        chosen = (rows == reduced) | (jnp.isnan(rows) & jnp.isnan(reduced))
        chosen = chosen.astype(data.dtype)
        incoming = chosen * incoming / jnp.maximum(spread(total(chosen)), 1)
    elif reduce == "prod":  # of all others: only where one of them is 0 is that 0
        zero = (rows == 0).astype(data.dtype)
        zeros = spread(total(zero))
        other_zeros = zeros - zero
        nonzero = jnp.where(rows == 0, 1, rows)
        product = jax.vmap(lambda row, segment: jax.ops.segment_prod(row, segment, count))(nonzero, segments)
        product = spread(product * _start("prod", initial, data.dtype))
        if is_16_bit(out[0].dtype):  # in steps, as on the CPU
            product = jnp.where(zeros == 0, spread(_rows(output, axis)), product)
            incoming, product = stored(incoming * stored(product, out[0].dtype), out[0].dtype), 1
        incoming = jnp.where(other_zeros > 0, 0, incoming * product / nonzero)
    return incoming.reshape(data.shape)
