"""Histograms in one or several dimensions. A bin holds its left edge, the last one its right edge too."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax

from tpu_backend.lowering.bounds import require_all
from tpu_backend.lowering.pointwise import is_floating
from tpu_backend.lowering.registry import lowering, opmath, stored


def _range(values, limits, widening):
    """The outer edges: as given, or the smallest and the largest value; 0 and 1 where there is none."""
    if limits is not None:
        low, high = (jnp.asarray(limit, values.dtype) for limit in limits)
    elif values.size:
        low, high = jnp.min(values), jnp.max(values)
    else:
        low, high = jnp.zeros((), values.dtype), jnp.ones((), values.dtype)
    equal = low == high
    return jnp.where(equal, low - widening, low), jnp.where(equal, high + widening, high)


def _edges(points, bins: Sequence[int], limits: Sequence[float] | None):
    """Evenly spaced edges for each column of points (N, D)."""
    edges = []
    for axis, count in enumerate(bins):
        of_axis = None if limits is None else limits[2 * axis : 2 * axis + 2]
        low, high = _range(points[:, axis], of_axis, 0.5)
        edges.append(jnp.linspace(low, high, count + 1, dtype=points.dtype))
    return edges


def _counts(points, edges, weight, density):
    """Counts, or densities, of points (N, D) between the edges of each of the D axes."""
    shape = tuple(len(of_axis) - 1 for of_axis in edges)
    inside = jnp.ones(points.shape[0], bool)
    places = []
    for axis, of_axis in enumerate(edges):
        column = points[:, axis]
        inside &= (column >= of_axis[0]) & (column <= of_axis[-1])
        place = jnp.searchsorted(of_axis, column, side="right") - 1
        places.append(jnp.clip(place, 0, shape[axis] - 1))
    weight = jnp.ones(points.shape[0], points.dtype) if weight is None else weight.reshape(-1)
    counts = jnp.zeros(shape, points.dtype).at[tuple(places)].add(jnp.where(inside, weight, 0))
    if density:
        counts = counts / jnp.sum(counts)
        for axis, of_axis in enumerate(edges):
            widths = jnp.diff(of_axis)
            counts = counts / widths.reshape((-1,) + (1,) * (len(shape) - axis - 1))
    return counts


@lowering("histogram.bin_ct")
def histogram(self, bins=100, *, range=None, weight=None, density=False):
    points = self.reshape(-1, 1)
    edges = _edges(points, [bins], range)
    return _counts(points, edges, weight, density), edges[0]


@lowering("histogram.bins_tensor")
def histogram_between(self, bins, *, weight=None, density=False):
    return _counts(self.reshape(-1, 1), [bins], weight, density), bins


def _points(self):
    return self.reshape(-1, self.shape[-1])


@lowering("_histogramdd_bin_edges")
def histogramdd_edges(self, bins, *, range=None, weight=None, density=False):
    return _edges(_points(self), bins, range)


@lowering("_histogramdd_from_bin_cts")
def histogramdd(self, bins, *, range=None, weight=None, density=False):
    points = _points(self)
    return _counts(points, _edges(points, bins, range), weight, density)


@lowering("_histogramdd_from_bin_tensors")
def histogramdd_between(self, bins, *, weight=None, density=False):
    return _counts(_points(self), bins, weight, density)


@lowering("histc", static=("min", "max"))
def histc(self, bins=100, min=0, max=0):
    flat = self.reshape(-1)
    low, high = _range(flat, None if min == max and self.size else (min, max), 1)
    if is_floating(flat):
        finite = jnp.isfinite(low) & jnp.isfinite(high)
        require_all(finite, RuntimeError, "torch.histc: the range of the elements is not finite")
    inside = (flat >= low) & (flat <= high)
    # PyTorch rounds each step to the dtype of the values, and a bin may hang on it. Behind the barrier: XLA
    # multiplies by the inverse of a constant, which is not exact.
    wide, first, last = (value.astype(opmath(flat.dtype)) for value in (flat, low, high))
    span = lax.optimization_barrier(stored(last - first, flat.dtype))
    scaled = stored(stored(wide - first, flat.dtype) * bins, flat.dtype)
    position = jnp.floor(stored(scaled / span, flat.dtype)).astype(jnp.int32)
    position = jnp.where(inside, jnp.clip(position, 0, bins - 1), bins)
    return jnp.zeros(bins, self.dtype).at[position].add(1, mode="drop")
