"""Sampling an image at the points of a grid."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from tpu_backend.lowering.registry import lowering
from tpu_backend.lowering.resampling import CUBIC_A, cubic_kernel

_BILINEAR, _NEAREST, _BICUBIC = 0, 1, 2
_ZEROS, _BORDER, _REFLECTION = 0, 1, 2


def _unnormalized(coordinate, size, align_corners):
    """Grid coordinates in [-1, 1] as positions along a dim of the image."""
    if align_corners:
        return (coordinate + 1) / 2 * (size - 1)
    return ((coordinate + 1) * size - 1) / 2


def _padded(position, size, padding_mode, align_corners):
    """A position outside the image moved inside, as the padding mode says."""
    if padding_mode == _REFLECTION:
        low, span = (0.0, size - 1.0) if align_corners else (-0.5, float(size))
        if span == 0:
            position = jnp.zeros_like(position)
        else:
            distance = jnp.abs(position - low)
            flips, extra = jnp.floor(distance / span), jnp.mod(distance, span)
            position = jnp.where(flips % 2 == 0, extra + low, span - extra + low)
    if padding_mode in (_BORDER, _REFLECTION):
        position = jnp.clip(position, 0, size - 1)
    return position


def _taps(positions, plane, interpolation_mode, padding_mode, align_corners):
    """Which elements count at each grid point: pairs of (place along each dim, weight)."""

    def pad(position, size):
        return _padded(position, size, padding_mode, align_corners)

    if interpolation_mode == _BICUBIC:  # each tap is padded, the point between them is not
        corners = [jnp.floor(position) for position in positions]
        for tap in np.ndindex(*(4,) * len(plane)):
            places = [corner + (side - 1) for corner, side in zip(corners, tap, strict=True)]
            kernels = (
                cubic_kernel(position - place, CUBIC_A)
                for position, place in zip(positions, places, strict=True)
            )
            yield [pad(place, size) for place, size in zip(places, plane, strict=True)], math.prod(kernels)
        return
    positions = [pad(position, size) for position, size in zip(positions, plane, strict=True)]
    if interpolation_mode == _NEAREST:
        yield [jnp.round(position) for position in positions], 1
        return
    for corner in np.ndindex(*(2,) * len(plane)):
        places = [jnp.floor(position) + side for position, side in zip(positions, corner, strict=True)]
        distances = (1 - jnp.abs(position - place) for position, place in zip(positions, places, strict=True))
        yield places, math.prod(distances)


def _sample(input, grid, interpolation_mode, padding_mode, align_corners):
    plane = input.shape[2:]
    positions = [  # the grid lists x (the last dim) first
        _unnormalized(grid[..., -1 - i], size, align_corners) for i, size in enumerate(plane)
    ]
    batch = jnp.arange(input.shape[0]).reshape((-1,) + (1,) * len(plane))
    channels_last = jnp.moveaxis(input, 1, -1)
    total = 0
    for places, weight in _taps(positions, plane, interpolation_mode, padding_mode, align_corners):
        inside = math.prod(
            (place >= 0) & (place <= size - 1) for place, size in zip(places, plane, strict=True)
        )
        index = tuple(
            jnp.clip(place, 0, size - 1).astype(jnp.int32) for place, size in zip(places, plane, strict=True)
        )
        total = total + jnp.where(inside, weight, 0)[..., None] * channels_last[(batch, *index)]
    return jnp.moveaxis(total, -1, 1)


@lowering("grid_sampler_2d", "grid_sampler_3d", promote="opmath")
def grid_sampler(input, grid, interpolation_mode, padding_mode, align_corners):
    return _sample(input, grid, interpolation_mode, padding_mode, align_corners)


@lowering("grid_sampler_2d_backward", "grid_sampler_3d_backward", promote="opmath")
def grid_sampler_backward(
    grad_output, input, grid, interpolation_mode, padding_mode, align_corners, output_mask
):
    options = (interpolation_mode, padding_mode, align_corners)
    _, transpose = jax.vjp(lambda image, places: _sample(image, places, *options), input, grid)
    grad_input, grad_grid = transpose(grad_output)
    return grad_input if output_mask[0] else None, grad_grid
