"""Max, average and adaptive pooling over the trailing spatial dims, and their derivatives.

Indices are PyTorch's: positions in the flattened spatial plane of each channel.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tpu_backend.lowering.bounds import require_in_range
from tpu_backend.lowering.registry import NotLoweredError, is_16_bit, lowering, opmath, stored


def _each_dim(values: int | Sequence[int], rank: int) -> tuple[int, ...]:
    values = (values,) if isinstance(values, int) else tuple(values)
    return values if len(values) == rank else values * rank


@dataclass(frozen=True)
class _Windows:
    """The windows along one dim: output ``o`` covers ``starts[o] + i * dilation`` for ``i < lengths[o]``."""

    starts: np.ndarray
    lengths: np.ndarray
    dilation: int

    def positions(self, size: int) -> tuple[np.ndarray, np.ndarray]:
        """(outputs, longest window) positions that are safe to read, and which belong to their window."""
        offsets = np.arange(self.lengths.max(initial=1))
        positions = self.starts[:, None] + offsets * self.dilation
        valid = (positions >= 0) & (positions < size) & (offsets < self.lengths[:, None])
        return positions.clip(0, max(size - 1, 0)), valid


def _regular_windows(outputs, kernel, stride, padding, dilation):
    return _Windows(np.arange(outputs) * stride - padding, np.full(outputs, kernel), dilation)


def _adaptive_windows(outputs, size):
    starts = np.arange(outputs) * size // outputs
    ends = -(-(np.arange(outputs) + 1) * size // outputs)
    return _Windows(starts, ends - starts, 1)


# ---- max


def _lowest(dtype):
    return -jnp.inf if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).min


def _max_over(self, windows):
    """Largest value of every window and its position in the flattened plane."""
    rank = len(windows)
    plane = self.shape[-rank:]
    lead = self.ndim - rank
    patches, valid = self, np.ones((1,) * (2 * rank), bool)
    for i, (window, size) in enumerate(zip(windows, plane, strict=True)):
        positions, inside = window.positions(size)
        axis = lead + 2 * i
        patches = jnp.take(patches, positions, axis=axis, mode="clip")
        shape = [1] * (2 * rank)
        shape[2 * i], shape[2 * i + 1] = inside.shape
        valid = valid & inside.reshape(shape)
    patches = jnp.where(valid, patches, jnp.asarray(_lowest(self.dtype), self.dtype))
    outputs, widths = patches.shape[lead::2], patches.shape[lead + 1 :: 2]
    order = (*range(lead), *range(lead, patches.ndim, 2), *range(lead + 1, patches.ndim, 2))
    patches = patches.transpose(order).reshape(*self.shape[:lead], *outputs, math.prod(widths))
    # A TPU divides 64-bit integers in many steps: those of ResNet's pooling took half of its training step.
    index = jnp.int32 if math.prod(plane) <= np.iinfo(np.int32).max else jnp.int64
    winner = lax.argmax(patches, patches.ndim - 1, index)
    position = jnp.zeros((), index)
    for i, (window, size) in enumerate(zip(windows, plane, strict=True)):
        offset = winner // math.prod(widths[i + 1 :]) % widths[i]
        starts = window.starts.astype(index).reshape((-1,) + (1,) * (rank - 1 - i))
        position = position * size + starts + offset * window.dilation
    return jnp.max(patches, -1), position.astype(jnp.int64)


_MOST_PLACES = 64
"""Of a window whose places are written out one by one."""


@dataclass(frozen=True)
class _Places:
    """The places of equal windows, one after the other: slices of the plane, and positions in it.

    Gathers of windows and a scatter of gradients are slow on a TPU. For the gradient of ResNet's pooling XLA
    sorted all values and put them down one by one.
    """

    outputs: tuple[int, ...]
    plane: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]

    @property
    def all(self) -> list[tuple[int, ...]]:
        """In the order of a window's values."""
        return list(itertools.product(*map(range, self.kernel)))

    def _along_dims(self, of_dim) -> jax.Array:
        """Positions in the flattened plane, from coordinates: ``of_dim(dim)`` has one for each output."""
        rank, total = len(self.plane), jnp.zeros((), jnp.int32)
        for dim in range(rank):
            shape = (-1,) + (1,) * (rank - 1 - dim)
            step = math.prod(self.plane[dim + 1 :])
            total = total + jnp.asarray(of_dim(dim) * step, jnp.int32).reshape(shape)
        return total

    def positions(self, place: tuple[int, ...]) -> jax.Array:
        def of_dim(dim):
            return np.arange(self.outputs[dim]) * self.stride[dim] + self._first(place, dim)

        return self._along_dims(of_dim)

    def first_positions(self) -> jax.Array:
        """Of each window, its first place that is no padding."""

        def of_dim(dim):
            starts = np.arange(self.outputs[dim]) * self.stride[dim] - self.padding[dim]
            return starts + -(-np.maximum(-starts, 0) // self.dilation[dim]) * self.dilation[dim]

        return self._along_dims(of_dim)

    def _first(self, place: tuple[int, ...], dim: int) -> int:
        return place[dim] * self.dilation[dim] - self.padding[dim]

    def _margins(self, place: tuple[int, ...]) -> list[tuple[int, int]]:
        """How much of the plane lies before the place's first value and behind its last one; less than
        nothing where they are padding.
        """
        found = []
        for dim, size in enumerate(self.plane):
            first = self._first(place, dim)
            found.append((first, size - 1 - first - (self.outputs[dim] - 1) * self.stride[dim]))
        return found

    def padded(self, plane: jax.Array, fill: jax.Array) -> jax.Array:
        """All that any window reaches."""
        lead, last = [(0, 0, 0)] * (plane.ndim - len(self.plane)), tuple(n - 1 for n in self.kernel)
        margins = zip(self.padding, self._margins(last), strict=True)
        return lax.pad(plane, fill, [*lead, *((before, max(0, -after), 0) for before, (_, after) in margins)])

    def values(self, padded: jax.Array, place: tuple[int, ...]) -> jax.Array:
        """What all windows have there."""
        lead = padded.ndim - len(self.plane)
        starts = [first * step for first, step in zip(place, self.dilation, strict=True)]
        ends = [
            start + (count - 1) * step + 1
            for start, count, step in zip(starts, self.outputs, self.stride, strict=True)
        ]
        sizes = padded.shape[:lead]
        return lax.slice(padded, (*(0,) * lead, *starts), (*sizes, *ends), (*(1,) * lead, *self.stride))

    def put(self, values: jax.Array, place: tuple[int, ...]) -> jax.Array:
        """A plane of zeros, with a value of each window there."""
        steps = [(*margin, step - 1) for margin, step in zip(self._margins(place), self.stride, strict=True)]
        lead = [(0, 0, 0)] * (values.ndim - len(self.plane))
        return lax.pad(values, jnp.zeros((), values.dtype), [*lead, *steps])


def _places(outputs, plane, kernel_size, stride=(), padding=0, dilation=1) -> _Places | None:
    """None: there are too many."""
    rank = len(plane)
    kernel = _each_dim(kernel_size, rank)
    options = (kernel, _each_dim(stride or kernel, rank), _each_dim(padding, rank), _each_dim(dilation, rank))
    if math.prod(kernel) > _MOST_PLACES or math.prod(plane) > np.iinfo(np.int32).max:
        return None
    return _Places(tuple(outputs), tuple(plane), *options)


@lowering("max_pool2d_with_indices", "max_pool3d_with_indices")
def max_pool(self, kernel_size, stride=(), padding=0, dilation=1, ceil_mode=False, out=None):
    rank = 2 if isinstance(kernel_size, int) else len(kernel_size)
    outputs, plane = out[0].shape[-rank:], self.shape[-rank:]
    places = _places(outputs, plane, kernel_size, stride, padding, dilation)
    if places is None:
        return _max_over(self, _pool_windows(self, rank, kernel_size, stride, padding, dilation, out))
    lowest = jnp.asarray(_lowest(self.dtype), self.dtype)
    best = jnp.full((*self.shape[:-rank], *outputs), lowest)
    position = jnp.broadcast_to(places.first_positions(), best.shape)
    padded = places.padded(self, lowest)
    for place in places.all:
        values = places.values(padded, place)
        wins = (values > best) | (values != values)
        best, position = jnp.where(wins, values, best), jnp.where(wins, places.positions(place), position)
    # Else XLA would find the positions again in the backward pass, and keep what it finds them from.
    best, position = lax.optimization_barrier((best, position))
    return best, position.astype(jnp.int64)


def _pool_windows(self, rank, kernel_size, stride, padding, dilation, out):
    kernel = _each_dim(kernel_size, rank)
    options = (kernel, _each_dim(stride or kernel, rank), _each_dim(padding, rank), _each_dim(dilation, rank))
    return [_regular_windows(*geometry) for geometry in zip(out[0].shape[-rank:], *options, strict=True)]


@lowering("adaptive_max_pool2d")
def adaptive_max_pool2d(self, output_size):
    return _adaptive_max(self, output_size, 2)


@lowering("adaptive_max_pool3d")
def adaptive_max_pool3d(self, output_size):
    return _adaptive_max(self, output_size, 3)


def _adaptive_max(self, output_size, rank):
    sizes = _each_dim(output_size, rank)
    return _max_over(self, [_adaptive_windows(o, n) for o, n in zip(sizes, self.shape[-rank:], strict=True)])


def _scatter_to_plane(values, indices, shape, rank, method):
    """Values put at their flattened positions in planes of zeros."""
    planes, places = math.prod(shape[:-rank]), math.prod(indices.shape[-rank:])
    flat_indices = indices.reshape(planes, places)
    target = jnp.zeros((planes, math.prod(shape[-rank:])), values.dtype)
    rows = jnp.arange(planes)[:, None]
    return getattr(target.at[rows, flat_indices], method)(values.reshape(planes, places)).reshape(shape)


def _max_backward(rank):
    def backward(grad_output, self, *geometry):
        return _scatter_to_plane(grad_output, geometry[-1], self.shape, rank, "add")

    return backward


# Not in float32: where windows overlap, PyTorch's CPU adds up in the dtype of the gradient.
for _rank in (2, 3):
    lowering(f"adaptive_max_pool{_rank}d_backward", f"fractional_max_pool{_rank}d_backward")(
        _max_backward(_rank)
    )


@lowering("max_pool2d_with_indices_backward", "max_pool3d_with_indices_backward")
def max_pool_backward(grad_output, self, kernel_size, stride, padding, dilation, ceil_mode, indices):
    rank = len(kernel_size)
    plane = self.shape[-rank:]
    places = _places(indices.shape[-rank:], plane, kernel_size, stride, padding, dilation)
    if places is None:
        return _scatter_to_plane(grad_output, indices, self.shape, rank, "add")
    dtype, indices = grad_output.dtype, indices.astype(jnp.int32)
    total = jnp.zeros(self.shape, opmath(dtype))
    for place in reversed(places.all):  # in the order of the windows
        here = jnp.where(indices == places.positions(place), grad_output, jnp.zeros((), dtype))
        total = stored(total + places.put(here, place).astype(total.dtype), dtype)
    return total.astype(dtype)


@lowering("max_unpool2d")
def max_unpool2d(self, indices, output_size):
    height, width = output_size
    text = f"Found an invalid max index: {{index}} (output volumes are of size {height}x{width})"
    require_in_range(indices, 0, height * width, RuntimeError, text)
    return _scatter_to_plane(self, indices, (*self.shape[:-2], *output_size), 2, "set")


@lowering("max_unpool3d")
def max_unpool3d(self, indices, output_size, stride, padding):
    time, height, width = output_size
    text = f"found an invalid max index {{index}} (output volumes are of size {time}x{height}x{width}"
    require_in_range(indices, 0, time * height * width, RuntimeError, text)
    return _scatter_to_plane(self, indices, (*self.shape[:-3], *output_size), 3, "set")


# ---- average


@dataclass(frozen=True)
class _AveragePool:
    """The windows of an average pool over planes: one entry a dim."""

    plane: tuple[int, ...]
    outputs: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]

    @staticmethod
    def of(plane, outputs, kernel_size, stride, padding):
        rank = len(outputs)
        kernel = _each_dim(kernel_size, rank)
        return _AveragePool(
            tuple(plane), tuple(outputs), kernel, _each_dim(stride or kernel, rank), _each_dim(padding, rank)
        )

    def dims(self):
        return zip(self.plane, self.outputs, self.kernel, self.stride, self.padding, strict=True)

    def pads(self):
        """What the planes are padded by: the last window may end behind the padding."""
        return [(p, max((count - 1) * s + k - size - p, 0)) for size, count, k, s, p in self.dims()]

    def divisor(self, count_include_pad):
        """How many elements each window averages: (*outputs)."""
        divisor = np.ones((), np.int64)
        for size, count, k, s, p in self.dims():
            starts = np.arange(count) * s - p
            ends = np.minimum(starts + k, size + p)
            covered = ends - starts if count_include_pad else ends.clip(max=size) - starts.clip(min=0)
            divisor = divisor[..., None] * covered
        return divisor


def _average(self, pool, divisor):
    lead = self.ndim - len(pool.outputs)
    windows = [(1,) * lead + each for each in (pool.kernel, pool.stride)]
    sums = lax.reduce_window(self, np.zeros((), self.dtype), lax.add, *windows, [(0, 0)] * lead + pool.pads())
    sums = sums[(..., *(slice(count) for count in pool.outputs))]
    divisors = jnp.asarray(divisor, self.dtype)
    if jnp.issubdtype(self.dtype, jnp.integer):
        return lax.div(sums, jnp.broadcast_to(divisors, sums.shape))
    return sums / divisors


def _average_transposed(grad_output, pool, divisor, dtype):
    """Each window's share added to its elements, one window after the other and rounded to 16 bit each time,
    as in PyTorch's CPU kernel. An element lies further behind in an earlier window: offsets go down.
    """
    lead = grad_output.ndim - len(pool.outputs)
    shares = stored(grad_output / jnp.asarray(divisor, grad_output.dtype), dtype)
    sizes = [size + before + behind for size, (before, behind) in zip(pool.plane, pool.pads(), strict=True)]
    total = jnp.zeros((*grad_output.shape[:lead], *sizes), grad_output.dtype)
    for offsets in itertools.product(*(range(k - 1, -1, -1) for k in pool.kernel)):
        spread = [
            (offset, size - offset - (count - 1) * s - 1, s - 1)
            for offset, size, count, s in zip(offsets, sizes, pool.outputs, pool.stride, strict=True)
        ]
        placed = lax.pad(shares, np.zeros((), shares.dtype), [(0, 0, 0)] * lead + spread)
        total = stored(total + placed, dtype)
    inner = (slice(p, p + size) for size, p in zip(pool.plane, pool.padding, strict=True))
    return total[(..., *inner)]


@lowering("avg_pool2d", "avg_pool3d", promote="opmath")
def avg_pool(
    self,
    kernel_size,
    stride=(),
    padding=0,
    ceil_mode=False,
    count_include_pad=True,
    divisor_override=None,
    out=None,
):
    rank = len(kernel_size) if len(kernel_size) > 1 else 2
    pool = _AveragePool.of(self.shape[-rank:], out[0].shape[-rank:], kernel_size, stride, padding)
    return _average(self, pool, divisor_override or pool.divisor(count_include_pad))


def _avg_pool_backward(rank):
    def backward(
        grad_output,
        self,
        kernel_size,
        stride,
        padding,
        ceil_mode,
        count_include_pad,
        divisor_override,
        *,
        out,
    ):
        pool = _AveragePool.of(self.shape[-rank:], grad_output.shape[-rank:], kernel_size, stride, padding)
        divisor = divisor_override or pool.divisor(count_include_pad)
        if is_16_bit(out[0].dtype):
            return _average_transposed(grad_output, pool, divisor, out[0].dtype)
        return jax.vjp(lambda value: _average(value, pool, divisor), self)[1](grad_output)[0]

    return backward


for _rank in (2, 3):
    lowering(f"avg_pool{_rank}d_backward", promote="opmath")(_avg_pool_backward(_rank))


def _adaptive_average(self, outputs):
    """One small averaging matrix a dim; a plain mean where a dim is reduced to one element."""
    rank = len(outputs)
    for axis, count in zip(range(self.ndim - rank, self.ndim), outputs, strict=True):
        size = self.shape[axis]
        if count == 1:
            self = jnp.mean(self, axis, keepdims=True)
            continue
        windows = _adaptive_windows(count, size)
        positions = np.arange(size)
        inside = (positions >= windows.starts[:, None]) & (
            positions < (windows.starts + windows.lengths)[:, None]
        )
        weights = jnp.asarray(inside / windows.lengths[:, None], self.dtype)
        self = jnp.moveaxis(jnp.tensordot(weights, self, (1, axis), precision=lax.Precision.HIGHEST), 0, axis)
    return self


@lowering("_adaptive_avg_pool2d", "_adaptive_avg_pool3d", promote="opmath")
def adaptive_avg_pool(self, output_size):
    if 0 in self.shape[-len(output_size) :]:
        raise NotLoweredError("means of nothing: PyTorch refuses them, in its own words on the CPU")
    return _adaptive_average(self, tuple(output_size))


def _adaptive_average_transposed(grad_output, windows, plane):
    """As `_average_transposed`, where windows differ in size: in the dtype of the gradient, as on the CPU."""
    rank = len(plane)
    outputs, shares = np.arange(math.prod(grad_output.shape[-rank:])), grad_output
    places, inside = np.zeros((1,) * (2 * rank), int), np.ones((1,) * (2 * rank), bool)
    for i, (window, size) in enumerate(zip(windows, plane, strict=True)):
        shape = [1] * (2 * rank)
        positions, valid = window.positions(size)
        shape[i], shape[rank + i] = positions.shape
        places, inside = places * size + positions.reshape(shape), inside & valid.reshape(shape)
        lengths = window.lengths.reshape((-1,) + (1,) * (rank - 1 - i))
        shares = (shares.astype(jnp.float32) / lengths.astype(np.float32)).astype(grad_output.dtype)
    inside = inside.reshape(outputs.size, -1)
    sources = np.broadcast_to(outputs[:, None], inside.shape)[inside]  # in the order of outputs
    shares = shares.reshape(*grad_output.shape[:-rank], outputs.size)[..., sources]
    planes = jnp.zeros((*grad_output.shape[:-rank], math.prod(plane)), grad_output.dtype)
    return (
        planes.at[..., places.reshape(inside.shape)[inside]].add(shares).reshape(*planes.shape[:-1], *plane)
    )


def _adaptive_avg_pool_backward(rank):
    def backward(grad_output, self):
        outputs, plane = grad_output.shape[-rank:], self.shape[-rank:]
        windows = [_adaptive_windows(count, size) for count, size in zip(outputs, plane, strict=True)]
        overlap = any(size % count for count, size in zip(outputs, plane, strict=True))
        if is_16_bit(self.dtype) and overlap:
            return _adaptive_average_transposed(grad_output, windows, plane)
        grad_output, self = (value.astype(opmath(value.dtype)) for value in (grad_output, self))
        return jax.vjp(lambda value: _adaptive_average(value, outputs), self)[1](grad_output)[0]

    return backward


for _rank in (2, 3):
    lowering(f"_adaptive_avg_pool{_rank}d_backward")(_adaptive_avg_pool_backward(_rank))
