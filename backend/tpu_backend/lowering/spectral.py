"""Fourier transforms. ``normalization`` is PyTorch's enum: 0 none, 1 by the root of n, 2 by n."""

from __future__ import annotations

import math

import jax.numpy as jnp

from tpu_backend.lowering.registry import lowering


def _normalized(values, count, normalization):
    return values * {0: 1.0, 1: 1 / math.sqrt(count), 2: 1 / count}[normalization]


@lowering("_fft_c2c")
def fft_c2c(self, dim, normalization, forward):
    count = math.prod(self.shape[axis] for axis in dim)
    if forward:
        return _normalized(jnp.fft.fftn(self, axes=dim), count, normalization)
    return _normalized(jnp.fft.ifftn(self, axes=dim, norm="forward"), count, normalization)


@lowering("_fft_r2c")
def fft_r2c(self, dim, normalization, onesided):
    count = math.prod(self.shape[axis] for axis in dim)
    transform = jnp.fft.rfftn if onesided else jnp.fft.fftn
    return _normalized(transform(self, axes=dim), count, normalization)


@lowering("_fft_c2r")
def fft_c2r(self, dim, normalization, last_dim_size):
    sizes = [self.shape[axis] for axis in dim[:-1]] + [last_dim_size]
    result = jnp.fft.irfftn(self, s=sizes, axes=dim, norm="forward")
    return _normalized(result, math.prod(sizes), normalization)
