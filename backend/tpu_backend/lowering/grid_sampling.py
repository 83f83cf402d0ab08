"""Sampling an image at the points of a grid."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np

from tpu_backend.lowering import rounding
from tpu_backend.lowering.registry import lowering
from tpu_backend.lowering.resampling import CUBIC_A

_BILINEAR, _NEAREST, _BICUBIC = 0, 1, 2
_ZEROS, _BORDER, _REFLECTION = 0, 1, 2


def _unnormalized(coordinate, size, align_corners, fused):
    """Grid coordinates in [-1, 1] as positions along a dim of the image."""
    if align_corners:
        return (coordinate + 1) / 2 * (size - 1)
    if fused:
        return rounding.fused(coordinate + 1, size / 2, -0.5)
    return rounding.product(coordinate + 1, size / 2) - 0.5


def _padded(position, size, padding_mode, align_corners):
    """A position outside the image moved inside, as the padding mode says, and how fast it moves then."""
    slope = jnp.ones_like(position)
    if padding_mode == _REFLECTION:
        low, span = (0.0, size - 1.0) if align_corners else (-0.5, float(size))
        if span == 0:
            return jnp.zeros_like(position), jnp.zeros_like(position)
        distance = jnp.abs(position - low)
        flips, extra = jnp.floor(distance / span), jnp.mod(distance, span)
        turned = jnp.where(position < low, -1, 1)
        slope = jnp.where(flips % 2 == 0, turned, -turned).astype(position.dtype)
        position = jnp.where(flips % 2 == 0, extra + low, span - extra + low)
    if padding_mode in (_BORDER, _REFLECTION):
        slope = jnp.where((position > 0) & (position < size - 1), slope, 0)
        position = jnp.clip(position, 0, size - 1)
    return position, slope


def _taps(positions, plane, interpolation_mode, padding_mode, align_corners):
    """Which elements count at each grid point: triples of lists with one item for each dim of the image,
    the place, its weight, and how the weight grows with the position.
    """

    def pad(positions):
        padded = [_padded(*each, padding_mode, align_corners) for each in zip(positions, plane, strict=True)]
        return zip(*padded, strict=True)

    if interpolation_mode == _BICUBIC:  # each tap is padded, the point between them is not
        beside = [[jnp.floor(position) + side for side in (-1, 0, 1, 2)] for position in positions]
        cubics = [
            [_cubic(position - place) for place in places]
            for position, places in zip(positions, beside, strict=True)
        ]
        for tap in np.ndindex(*(4,) * len(plane)):
            places = [along[side] for along, side in zip(beside, tap, strict=True)]
            weights, slopes = zip(
                *(along[side] for along, side in zip(cubics, tap, strict=True)), strict=True
            )
            yield next(iter(pad(places))), weights, slopes
        return
    positions, speeds = pad(positions)
    if interpolation_mode == _NEAREST:
        still = [jnp.zeros_like(position) for position in positions]
        yield [jnp.round(position) for position in positions], [jnp.ones_like(each) for each in still], still
        return
    for corner in np.ndindex(*(2,) * len(plane)):
        places = [jnp.floor(position) + side for position, side in zip(positions, corner, strict=True)]
        weights = [1 - jnp.abs(position - place) for position, place in zip(positions, places, strict=True)]
        yield places, weights, [speed * (2 * side - 1) for speed, side in zip(speeds, corner, strict=True)]


def _cubic(offset):
    """The cubic convolution kernel of Keys (1981) and its derivative, every operation rounded: in a slope the
    taps nearly cancel, and JAX's differentiation would lose the digits that they have.
    """
    a, distance = CUBIC_A, jnp.abs(offset)

    def times(factor):
        return rounding.product(factor, distance)

    near = times((times(a + 2) - (a + 3)) * distance) + 1
    far = times(times(times(a) - 5 * a) + 8 * a) - 4 * a
    near_slope = times(times(3 * (a + 2)) - 2 * (a + 3))
    far_slope = times(times(3 * a) - 10 * a) + 8 * a
    is_near, is_far = distance <= 1, distance < 2
    weight = jnp.where(is_near, near, jnp.where(is_far, far, 0))
    return weight, jnp.sign(offset) * jnp.where(is_near, near_slope, jnp.where(is_far, far_slope, 0))


def _positions(grid, plane, align_corners):
    """Where the grid points lie along each dim of the image; the grid lists x, the last dim, first.

    A gradient can change much with the last bit: PyTorch fuses the multiply-add in two dims, not in three.
    """
    fused = len(plane) == 2
    return [_unnormalized(grid[..., -1 - i], size, align_corners, fused) for i, size in enumerate(plane)]


def _index(places, plane, num_images):
    """Where the elements lie in an image with channels last, and whether they are inside of it."""
    inside = math.prod((place >= 0) & (place <= size - 1) for place, size in zip(places, plane, strict=True))
    batch = jnp.arange(num_images).reshape((-1,) + (1,) * len(plane))
    clipped = (jnp.clip(place, 0, size - 1) for place, size in zip(places, plane, strict=True))
    return (batch, *(place.astype(jnp.int32) for place in clipped)), inside[..., None]


@lowering("grid_sampler_2d", "grid_sampler_3d", promote="opmath", one_dtype=("input", "grid"))
def grid_sampler(input, grid, interpolation_mode, padding_mode, align_corners):
    plane, channels_last = input.shape[2:], jnp.moveaxis(input, 1, -1)
    positions = _positions(grid, plane, align_corners)
    total = 0
    for places, weights, _ in _taps(positions, plane, interpolation_mode, padding_mode, align_corners):
        index, inside = _index(places, plane, input.shape[0])
        total = total + jnp.where(inside, math.prod(weights)[..., None], 0) * channels_last[index]
    return jnp.moveaxis(total, -1, 1)


@lowering("grid_sampler_2d_backward", "grid_sampler_3d_backward", promote="opmath")
def grid_sampler_backward(
    grad_output, input, grid, interpolation_mode, padding_mode, align_corners, output_mask
):
    """Slopes are summed over the taps of each channel first, as in PyTorch's kernel: those nearly cancel."""
    plane, channels_last = input.shape[2:], jnp.moveaxis(input, 1, -1)
    grads = jnp.moveaxis(grad_output, 1, -1)
    positions = _positions(grid, plane, align_corners)
    grad_input, slopes = jnp.zeros_like(channels_last), [0] * len(plane)
    for places, weights, growth in _taps(positions, plane, interpolation_mode, padding_mode, align_corners):
        index, inside = _index(places, plane, input.shape[0])
        if output_mask[0]:
            weight = jnp.where(inside, math.prod(weights)[..., None], 0)
            grad_input = grad_input.at[index].add(weight * grads)
        if output_mask[1]:
            values = jnp.where(inside, channels_last[index], 0)
            for dim in range(len(plane)):
                factors = [*weights[:dim], growth[dim], *weights[dim + 1 :]]
                slopes[dim] = slopes[dim] + math.prod(factors)[..., None] * values
    grad_grid = None
    if output_mask[1]:
        spacing = [(size - 1 if align_corners else size) / 2 for size in plane]
        along = [jnp.sum(slope * grads, -1) * each for slope, each in zip(slopes, spacing, strict=True)]
        grad_grid = jnp.stack(along[::-1], -1)
    return jnp.moveaxis(grad_input, -1, 1) if output_mask[0] else None, grad_grid
