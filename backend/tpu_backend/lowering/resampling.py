"""Upsampling. Interpolation is separable: one small matrix a spatial dim, good on TPUs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tpu_backend.lowering.registry import is_16_bit, lowering

CUBIC_A = -0.75  # PyTorch's choice of the cubic convolution kernel
_ANTIALIASED_CUBIC_A = -0.5  # and its other choice, the one of Pillow


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


def _held(weights, kept):
    """Weights as a 16-bit dtype holds them, in which PyTorch's CPU keeps most of them; None: as they are."""
    if kept is None or not is_16_bit(kept):
        return weights
    return np.asarray(weights, np.float32).astype(kept).astype(np.float32)


def _linear_weights(size, count, scale, align_corners, dtype, kept=None):
    ratio = dtype.type(_ratio(size, count, scale, align_corners))
    source = np.arange(count, dtype=dtype) * ratio
    if not align_corners:
        source = ((np.arange(count, dtype=dtype) + 0.5) * ratio - 0.5).clip(min=0)
    left = np.floor(source).astype(int).clip(max=size - 1)
    weights, behind = np.zeros((count, size)), _held(source - left, kept)
    np.add.at(weights, (np.arange(count), left), _held(1 - behind, kept))
    np.add.at(weights, (np.arange(count), (left + 1).clip(max=size - 1)), behind)
    return weights


def _cubic_weights(size, count, scale, align_corners, dtype, kept=None):
    ratio = dtype.type(_ratio(size, count, scale, align_corners))
    source = np.arange(count, dtype=dtype) * ratio
    if not align_corners:
        source = (np.arange(count, dtype=dtype) + 0.5) * ratio - 0.5
    left = np.floor(source).astype(int)
    weights = np.zeros((count, size))
    for tap in range(-1, 3):
        np.add.at(
            weights,
            (np.arange(count), (left + tap).clip(0, size - 1)),
            _held(_cubic_kernel(source - (left + tap), CUBIC_A), kept),
        )
    return weights


def _cubic_kernel(offset, a):
    """The cubic convolution kernel of Keys (1981) for offsets in [-2, 2]."""
    distance = np.abs(offset)
    near = ((a + 2) * distance - (a + 3)) * distance * distance + 1
    far = ((a * distance - 5 * a) * distance + 8 * a) * distance - 4 * a
    return np.where(distance <= 1, near, np.where(distance < 2, far, 0))


# ---- antialiased: the kernel is widened to cover the input elements that an output element stands for


def _lanczos_kernel(offset):
    return np.where(np.abs(offset) < 3, np.sinc(offset) * np.sinc(offset / 3), 0)


_ANTIALIASED = {  # name: (kernel, how far it reaches)
    "bilinear2d": (lambda offset: np.maximum(1 - np.abs(offset), 0), 1),
    "bicubic2d": (lambda offset: _cubic_kernel(offset, _ANTIALIASED_CUBIC_A), 2),
    "lanczos2d": (_lanczos_kernel, 3),
}


def _antialiased_weights(kernel, reach):
    def weights_of(size, count, scale, align_corners, dtype, kept=None):
        ratio = dtype.type(_ratio(size, count, scale, align_corners))
        widened = np.maximum(ratio, dtype.type(1))
        centre = (ratio * (np.arange(count, dtype=dtype) + dtype.type(0.5)))[:, None]
        first = np.trunc(centre - reach * widened + 0.5).clip(min=0)
        last = np.trunc(centre + reach * widened + 0.5).clip(max=size)
        places = np.arange(size, dtype=dtype)
        weights = kernel((places - centre + 0.5) / widened) * ((places >= first) & (places < last))
        return weights / weights.sum(1, keepdims=True)

    return weights_of


def _in_fixed_point(weights):
    """Weights as 16-bit integers, and by how many bits they are shifted: PyTorch's arithmetic on bytes."""
    top, shift = weights.max(), 0
    while shift < 22 and int(0.5 + top * 2 ** (shift + 1)) < 2**15:
        shift += 1
    return np.trunc(weights * 2**shift + np.copysign(0.5, weights)).astype(np.int32), shift


def _interpolate_bytes(self, output_size, align_corners, scales, weights_of):
    for axis in reversed(range(2, self.ndim)):  # each dim is rounded to bytes
        count, scale = output_size[axis - 2], scales[axis - 2]
        weights = weights_of(self.shape[axis], count, scale, align_corners, np.dtype(np.float64))
        weights, shift = _in_fixed_point(weights)
        sums = jnp.tensordot(weights, self.astype(jnp.int32), (1, axis)) + ((1 << shift) >> 1)
        self = jnp.moveaxis(jnp.clip(sums >> shift, 0, 255).astype(jnp.uint8), 0, axis)
    return self


def _interpolate(self, output_size, align_corners, scales, kept, weights_of):
    if self.dtype == jnp.uint8:
        return _interpolate_bytes(self, output_size, align_corners, scales, weights_of)
    for axis, count, scale in zip(range(2, self.ndim), output_size, scales, strict=True):
        weights = weights_of(self.shape[axis], count, scale, align_corners, self.dtype, kept)
        weights = jnp.asarray(weights, self.dtype)
        self = jnp.moveaxis(jnp.tensordot(weights, self, (1, axis), precision=lax.Precision.HIGHEST), 0, axis)
    return self


def _register(
    name: str, rank: int, resample: Callable, takes_align: bool, rounds_weights: bool = False
) -> None:
    """``resample(self, output_size, align_corners, scales, kept)`` and its transpose under PyTorch's names.

    ``kept`` is the dtype that the weights are rounded to; ``rounds_weights``: to that of the result, but not
    on the way back.
    """

    def options(rest: Sequence) -> tuple:
        align = rest[0] if takes_align else False
        scales = rest[1:] if takes_align else rest
        return align, scales or (None,) * rank

    def forward(self, output_size, *rest, out):
        return resample(self, output_size, *options(rest), out[0].dtype if rounds_weights else None)

    def backward(grad_output, output_size, input_size, *rest):
        image = jax.ShapeDtypeStruct(tuple(input_size), grad_output.dtype)
        transpose = jax.linear_transpose(
            lambda value: resample(value, output_size, *options(rest), None), image
        )
        return transpose(grad_output)[0]

    lowering(name, promote="opmath")(forward)
    lowering(f"{name}_backward", promote="opmath")(backward)


for _rank in (1, 2, 3):
    for _name, _exact in {"upsample_nearest": False, "_upsample_nearest_exact": True}.items():
        _register(
            f"{_name}{_rank}d",
            _rank,
            lambda self, size, align, scales, kept, exact=_exact: _nearest(self, size, scales, exact),
            takes_align=False,
        )
for _rank, _name in {1: "linear1d", 2: "bilinear2d", 3: "trilinear3d"}.items():
    _register(
        f"upsample_{_name}",
        _rank,
        functools.partial(_interpolate, weights_of=_linear_weights),
        rounds_weights=_rank != 2,  # the CPU has a kernel of its own for images
        takes_align=True,
    )
_register(
    "upsample_bicubic2d",
    2,
    functools.partial(_interpolate, weights_of=_cubic_weights),
    takes_align=True,
    rounds_weights=True,
)
for _name, _kernel in _ANTIALIASED.items():
    _register(
        f"_upsample_{_name}_aa",
        2,
        functools.partial(_interpolate, weights_of=_antialiased_weights(*_kernel)),
        takes_align=True,
    )
