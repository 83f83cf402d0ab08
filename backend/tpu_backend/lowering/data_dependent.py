"""Programs behind the operators whose output shapes depend on data, padded to a given ``size``.

The kernels in ``tpu_backend/data_dependent.py`` read how many elements there are, choose ``size`` and cut
the padding off. What stands in the padding is arbitrary.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax

from tpu_backend.lowering.bounds import require_in_range
from tpu_backend.lowering.registry import NotLoweredError, lowering


def true_positions(mask: jax.Array, size: int) -> jax.Array:
    """Where the first ``size`` Trues of a 1-d mask are; ``mask.size`` behind the last one.

    A sort, because a TPU scatters one element after the other.
    """
    dtype = jnp.int32 if mask.size < 2**31 else jnp.int64
    positions = lax.sort(jnp.where(mask, jnp.arange(mask.size, dtype=dtype), mask.size))
    return jnp.pad(positions, (0, max(0, size - mask.size)), constant_values=mask.size)[:size]


def _take(values: jax.Array, *index: jax.Array) -> jax.Array:
    """``values[index]``; what the padding points at does not matter."""
    return values.at[index].get(mode="clip", wrap_negative_indices=False)


# ---- masks


@lowering("tpu::true_indices")
def true_indices(self, count, *, size):
    """The coordinates of all non-zero elements, one dimension after the other: (ndim, count) in memory."""
    positions = true_positions((self != 0).reshape(-1), size // self.ndim)
    if self.ndim == 1:
        return positions
    place, count = jnp.arange(size, dtype=jnp.int64), jnp.maximum(count, 1)
    dim = jnp.minimum(place // count, self.ndim - 1)
    strides, lengths = _strides_and_lengths(self.shape)
    return _take(positions, place % count) // strides[dim] % lengths[dim]


@lowering("tpu::nonzero_static")
def nonzero_static(self, *, size, fill_value):
    """The coordinates of the first ``size`` non-zero elements (size, ndim), then ``fill_value``."""
    positions = true_positions((self != 0).reshape(-1), size)[:, None]
    strides, lengths = _strides_and_lengths(self.shape)
    return jnp.where(positions < self.size, positions // strides % lengths, fill_value)


def _strides_and_lengths(shape):
    """What takes a position in a contiguous tensor to its coordinates; dims without elements count as one."""
    strides = [max(1, math.prod(shape[dim + 1 :])) for dim in range(len(shape))]
    return jnp.array(strides, jnp.int64), jnp.array([max(1, length) for length in shape], jnp.int64)


def _masked(self, mask, axis, order):
    """``self`` with its masked dims joined, in the result's memory order: (outer, masked, inner)."""
    joined = self.reshape(*self.shape[:axis], mask.size, *self.shape[axis + mask.ndim :]).transpose(order)
    return joined, joined.shape, order.index(axis)


@lowering("tpu::masked_slices")
def masked_slices(self, mask, *, axis, order, size):
    """The slices of ``self`` where the mask is True, for a result whose outermost dim in memory they are."""
    joined, _, place = _masked(self, mask, axis, order)
    assert place == 0
    return _take(joined, true_positions((mask != 0).reshape(-1), size))


@lowering("tpu::masked_elements")
def masked_elements(self, mask, count, *, axis, order, size):
    """The same for a result with other dims around it: its elements as they lie in memory.  ``count`` shapes
    the result and not the program, so the places are computed.
    """
    joined, shape, place = _masked(self, mask, axis, order)
    outer, inner = shape[:place], shape[place + 1 :]
    joined = joined.reshape(math.prod(outer), mask.size, math.prod(inner))
    positions = true_positions((mask != 0).reshape(-1), min(mask.size, size))
    count = jnp.maximum(count, 1)
    element = jnp.arange(size, dtype=jnp.int64)
    row, column = element // joined.shape[2], element % joined.shape[2]
    return _take(joined, row // count, _take(positions, row % count), column)


# ---- unique


@lowering("tpu::group_elements")
def group_elements(self, *, sort):
    """Equal neighbours of the flat tensor as groups, after sorting if asked: the elements in order, the group
    of each, the group of each element of ``self``, the number of groups.  A NaN equals nothing.
    """
    flat = self.reshape(-1)
    origins = jnp.arange(flat.size)
    if sort:
        flat, origins = lax.sort((flat, origins), num_keys=1, is_stable=True)
    return _grouped(flat, origins, flat[1:] != flat[:-1], self.shape)


@lowering("tpu::group_slices")
def group_slices(self, *, dim, sort):
    """The same for the slices along ``dim``, sorted lexicographically."""
    slices = jnp.moveaxis(self, dim, 0)
    rows = slices.reshape(slices.shape[0], -1)
    origins = jnp.arange(rows.shape[0])
    if sort:  # column by column from the last: each sort is stable, and one program serves any width
        columns = rows.T

        def by_column(step: jax.Array, origins: jax.Array) -> jax.Array:
            column = columns[columns.shape[0] - 1 - step][origins]
            return lax.sort((column, origins), num_keys=1, is_stable=True)[1]

        origins = lax.fori_loop(0, columns.shape[0], by_column, origins)
    rows = rows[origins]
    changes = jnp.any(rows[1:] != rows[:-1], axis=1)
    return _grouped(slices[origins], origins, changes, origins.shape)


def _grouped(ordered, origins, changes, shape):
    group = jnp.concatenate([jnp.zeros(1, jnp.int64), jnp.cumsum(changes, dtype=jnp.int64)])
    inverse = jnp.zeros_like(group).at[origins].set(group).reshape(shape)
    return ordered, group, inverse, group[-1] + 1


@lowering("tpu::groups")
def groups(ordered, group, *, size):
    """The first element and the length of each group."""
    is_first = jnp.concatenate([jnp.ones(1, bool), group[1:] != group[:-1]])
    counts = jnp.zeros(size, jnp.int64).at[group].add(1, mode="drop")
    return _take(ordered, true_positions(is_first, size)), counts


# ---- counts and repeats


@lowering("tpu::bincount")
def bincount(self, weights=None, *, size, out):
    added = 1 if weights is None else weights.astype(out[0].dtype)
    return jnp.zeros(size, out[0].dtype).at[self].add(added, mode="drop")


@lowering("repeat_interleave.Tensor")
def repeat_interleave(repeats, *, output_size=None):
    if output_size is None:
        raise NotLoweredError("repeat_interleave without output_size: the result's length is in the repeats")
    text = f"repeat_interleave: output_size is {output_size}, the repeats make {{index}}"
    require_in_range(jnp.sum(repeats), output_size, output_size + 1, RuntimeError, text)
    return repeat_positions(repeats, size=output_size)


@lowering("tpu::repeat_positions")
def repeat_positions(repeats, *, size):
    if size == 0 or repeats.size == 0:
        return jnp.zeros(size, repeats.dtype)
    return jnp.repeat(jnp.arange(repeats.size), repeats, total_repeat_length=size)
