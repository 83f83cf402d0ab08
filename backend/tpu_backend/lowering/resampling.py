"""Upsampling and grid sampling. Interpolation is separable: one small matrix a spatial dim, good on TPUs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tpu_backend.lowering.registry import NotLoweredError, lowering

_CUBIC_A = -0.75  # PyTorch's choice of the cubic convolution kernel


def _ratio(size: int, count: int, scale: float | None, align_corners: bool) -> float:
    """Input positions an output position, as PyTorch's area_pixel_compute_scale."""
    if align_corners:
        return (size - 1) / (count - 1) if count > 1 else 0.0
    return 1 / scale if scale else size / count


# ---- nearest: a gather


def _nearest_positions(size, count, scale, exact):
    ratio = np.float32(_ratio(size, count, scale, False))
    positions = np.floor((np.arange(count, dtype=np.float32) + np.float32(0.5 if exact else 0)) * ratio)
    return positions.astype(np.int32).clip(max=size - 1)


def _nearest(self, output_size, scales, exact):
    for axis, count, scale in zip(range(2, self.ndim), output_size, scales, strict=True):
        positions = _nearest_positions(self.shape[axis], count, scale, exact)
        self = jnp.take(self, positions, axis=axis, mode="clip")
    return self


# ---- linear and cubic: a matrix a dim


def _linear_weights(size, count, scale, align_corners):
    source = np.arange(count) * _ratio(size, count, scale, True)
    if not align_corners:
        source = ((np.arange(count) + 0.5) * _ratio(size, count, scale, False) - 0.5).clip(min=0)
    left = np.floor(source).astype(int).clip(max=size - 1)
    weights = np.zeros((count, size))
    np.add.at(weights, (np.arange(count), left), 1 - (source - left))
    np.add.at(weights, (np.arange(count), (left + 1).clip(max=size - 1)), source - left)
    return weights


def _cubic_weights(size, count, scale, align_corners):
    source = np.arange(count) * _ratio(size, count, scale, True)
    if not align_corners:
        source = (np.arange(count) + 0.5) * _ratio(size, count, scale, False) - 0.5
    left = np.floor(source).astype(int)
    weights = np.zeros((count, size))
    for tap in range(-1, 3):
        distance = np.abs(source - (left + tap))
        near = ((_CUBIC_A + 2) * distance - (_CUBIC_A + 3)) * distance**2 + 1
        far = ((_CUBIC_A * distance - 5 * _CUBIC_A) * distance + 8 * _CUBIC_A) * distance - 4 * _CUBIC_A
        np.add.at(
            weights, (np.arange(count), (left + tap).clip(0, size - 1)), np.where(distance <= 1, near, far)
        )
    return weights


def _interpolate(self, output_size, align_corners, scales, weights_of):
    for axis, count, scale in zip(range(2, self.ndim), output_size, scales, strict=True):
        weights = jnp.asarray(weights_of(self.shape[axis], count, scale, align_corners), self.dtype)
        self = jnp.moveaxis(jnp.tensordot(weights, self, (1, axis), precision=lax.Precision.HIGHEST), 0, axis)
    return self


def _register(name: str, rank: int, resample: Callable, takes_align: bool) -> None:
    """``resample(self, output_size, align_corners, scales)`` and its transpose under PyTorch's signatures."""

    def options(rest: Sequence) -> tuple:
        align = rest[0] if takes_align else False
        scales = rest[1:] if takes_align else rest
        return align, scales or (None,) * rank

    def forward(self, output_size, *rest):
        return resample(self, output_size, *options(rest))

    def backward(grad_output, output_size, input_size, *rest):
        image = jax.ShapeDtypeStruct(tuple(input_size), grad_output.dtype)
        transpose = jax.linear_transpose(lambda value: resample(value, output_size, *options(rest)), image)
        return transpose(grad_output)[0]

    lowering(name, promote="opmath")(forward)
    lowering(f"{name}_backward", promote="opmath")(backward)


for _rank in (1, 2, 3):
    for _name, _exact in {"upsample_nearest": False, "_upsample_nearest_exact": True}.items():
        _register(
            f"{_name}{_rank}d",
            _rank,
            lambda self, size, align, scales, exact=_exact: _nearest(self, size, scales, exact),
            takes_align=False,
        )
for _rank, _name in {1: "linear1d", 2: "bilinear2d", 3: "trilinear3d"}.items():
    _register(
        f"upsample_{_name}",
        _rank,
        lambda self, size, align, scales: _interpolate(self, size, align, scales, _linear_weights),
        takes_align=True,
    )
_register(
    "upsample_bicubic2d",
    2,
    lambda self, size, align, scales: _interpolate(self, size, align, scales, _cubic_weights),
    takes_align=True,
)

# ---- grid sampling

_BILINEAR, _NEAREST = 0, 1
_ZEROS, _BORDER, _REFLECTION = 0, 1, 2


def _source_positions(coordinate, size, padding_mode, align_corners):
    """Grid coordinates in [-1, 1] as positions along a dim of the image."""
    if align_corners:
        position = (coordinate + 1) / 2 * (size - 1)
    else:
        position = ((coordinate + 1) * size - 1) / 2
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


def _sample(input, grid, interpolation_mode, padding_mode, align_corners):
    plane = input.shape[2:]
    positions = [  # the grid lists x (the last dim) first
        _source_positions(grid[..., -1 - i], size, padding_mode, align_corners)
        for i, size in enumerate(plane)
    ]
    if interpolation_mode == _NEAREST:
        corners = [([jnp.round(position) for position in positions], 1)]
    elif interpolation_mode == _BILINEAR:
        corners = []
        for corner in np.ndindex(*(2,) * len(plane)):
            places = [jnp.floor(position) + side for position, side in zip(positions, corner, strict=True)]
            distances = (
                1 - jnp.abs(position - place) for position, place in zip(positions, places, strict=True)
            )
            corners.append((places, math.prod(distances)))
    else:
        raise NotLoweredError("grid_sampler with bicubic interpolation")
    batch = jnp.arange(input.shape[0]).reshape((-1,) + (1,) * len(plane))
    channels_last = jnp.moveaxis(input, 1, -1)
    total = 0
    for places, weight in corners:
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
