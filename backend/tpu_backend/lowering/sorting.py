"""Sorting, selection by rank and search. NaN counts as the largest value, as in PyTorch."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from tpu_backend.lowering.dims import at_least_1d, wrap_dim
from tpu_backend.lowering.registry import NotLoweredError, lowering


def _sorted(values: jax.Array, axis: int, descending: bool) -> tuple[jax.Array, jax.Array]:
    """A stable sort, and where each element came from."""
    positions = lax.broadcasted_iota(jnp.int64, values.shape, axis)
    if not descending:
        ordered, origins = lax.sort((values, positions), dimension=axis, num_keys=1, is_stable=True)
        return ordered, origins
    # Reversed twice: NaN comes first, and equal elements keep their order.
    flipped = lax.sort(
        (jnp.flip(values, axis), jnp.flip(positions, axis)), dimension=axis, num_keys=1, is_stable=True
    )
    return jnp.flip(flipped[0], axis), jnp.flip(flipped[1], axis)


@lowering("sort.stable")
def sort_stable(self, *, stable=None, dim=-1, descending=False):
    values, positions = _sorted(at_least_1d(self), wrap_dim(dim, self.ndim), descending)
    return values.reshape(self.shape), positions.reshape(self.shape)


@lowering("sort")
def sort(self, dim=-1, descending=False):
    return sort_stable(self, dim=dim, descending=descending)


@lowering("topk")
def topk(self, k, dim=-1, largest=True, sorted=True):
    axis = wrap_dim(dim, self.ndim)
    if largest and jnp.issubdtype(self.dtype, jnp.floating) and self.ndim:
        # A NaN with its sign bit set is the least of all for XLA: inf - inf on a CPU is one.
        ranked = jnp.where(jnp.isnan(self), jnp.nan, self)
        values, positions = lax.top_k(jnp.moveaxis(ranked, axis, -1), k)
        return jnp.moveaxis(values, -1, axis), jnp.moveaxis(positions, -1, axis)
    values, positions = _sorted(at_least_1d(self), axis, descending=largest)
    cut = (slice(None),) * axis + (slice(k),)
    shape = self.shape if self.ndim == 0 else values[cut].shape
    return values[cut].reshape(shape), positions[cut].reshape(shape)


def _ranked(self, rank, dim, keepdim):
    """The element of a given rank along dim (``rank`` may differ over the other dims), and where it is."""
    axis = wrap_dim(dim, self.ndim)
    if self.ndim and self.shape[axis] == 0:
        raise NotLoweredError("a rank among none: PyTorch refuses it, in its own words on the CPU")
    values, positions = _sorted(at_least_1d(self), axis, descending=False)
    rank = jnp.broadcast_to(rank, (*values.shape[:axis], 1, *values.shape[axis + 1 :]))
    picked = [jnp.take_along_axis(array, rank, axis) for array in (values, positions)]
    if self.ndim == 0:
        return tuple(array.reshape(()) for array in picked)
    return tuple(array if keepdim else array.squeeze(axis) for array in picked)


@lowering("kthvalue")
def kthvalue(self, k, dim=-1, keepdim=False):
    return _ranked(self, k - 1, dim, keepdim)


@lowering("median.dim")
def median_dim(self, dim, keepdim=False):
    axis, values = wrap_dim(dim, self.ndim), at_least_1d(self)
    rank = (values.shape[axis] - 1) // 2
    if jnp.issubdtype(self.dtype, jnp.floating):  # any NaN: NaN, which sorts last
        has_nan = jnp.any(jnp.isnan(values), axis, keepdims=True)
        first_nan = values.shape[axis] - jnp.sum(jnp.isnan(values), axis, keepdims=True)
        rank = jnp.where(has_nan, first_nan, rank)
    return _ranked(self, rank, dim, keepdim)


@lowering("nanmedian.dim")
def nanmedian_dim(self, dim, keepdim=False):
    axis, values = wrap_dim(dim, self.ndim), at_least_1d(self)
    count = jnp.sum(~jnp.isnan(values), axis, keepdims=True)
    return _ranked(self, jnp.maximum(count - 1, 0) // 2, dim, keepdim)


@lowering("median")
def median(self):
    return _of_all(median_dim, self)


@lowering("nanmedian")
def nanmedian(self):
    return _of_all(nanmedian_dim, self)


def _of_all(along_dim, self):
    if self.size == 0 and jnp.issubdtype(self.dtype, jnp.floating):
        return jnp.full((), jnp.nan, self.dtype)
    return along_dim(self.reshape(-1), 0)[0]


@lowering("mode")
def mode(self, dim=-1, keepdim=False):
    """The smallest of the most frequent values, and the position of its last occurrence."""
    axis, values = wrap_dim(dim, self.ndim), jnp.moveaxis(at_least_1d(self), wrap_dim(dim, self.ndim), -1)
    ordered, positions = _sorted(values, values.ndim - 1, descending=False)
    counts = jnp.sum(ordered[..., :, None] == ordered[..., None, :], -1)
    winner = jnp.argmax(counts, -1, keepdims=True)
    value = jnp.take_along_axis(ordered, winner, -1)
    last = winner + jnp.take_along_axis(counts, winner, -1) - 1
    results = value, jnp.take_along_axis(positions, last, -1)
    if self.ndim == 0:
        return tuple(array.reshape(()) for array in results)
    return tuple(jnp.moveaxis(array, -1, axis) if keepdim else array.squeeze(-1) for array in results)


@lowering("searchsorted.Tensor", "searchsorted.Scalar")
def searchsorted(sorted_sequence, self, *, out_int32=False, right=False, side=None, sorter=None):
    right = right or side == "right"
    if sorter is not None:
        sorted_sequence = jnp.take_along_axis(sorted_sequence, sorter, -1)
    common = jnp.promote_types(sorted_sequence.dtype, jnp.asarray(self).dtype)
    sorted_sequence, wanted = sorted_sequence.astype(common), jnp.asarray(self, common)
    if wanted.size == 0 or sorted_sequence.size == 0:  # nothing to find, or every place is the first
        return jnp.zeros(wanted.shape, jnp.int32)

    def find(boundaries, values):
        return jnp.searchsorted(boundaries, values, side="right" if right else "left")

    if sorted_sequence.ndim == 1:
        return find(sorted_sequence, wanted)
    rows = sorted_sequence.reshape(-1, sorted_sequence.shape[-1])
    return jax.vmap(find)(rows, wanted.reshape(rows.shape[0], -1)).reshape(wanted.shape)


@lowering("bucketize.Tensor", "bucketize.Scalar")
def bucketize(self, boundaries, *, out_int32=False, right=False):
    if boundaries.ndim != 1:
        raise NotLoweredError("rows of boundaries: PyTorch refuses them, in its own words on the CPU")
    return searchsorted(boundaries, self, right=right)


@lowering("isin.Tensor_Tensor", "isin.Tensor_Scalar", "isin.Scalar_Tensor")
def isin(elements, test_elements, *, assume_unique=False, invert=False):
    return jnp.isin(elements, test_elements, invert=invert)
