"""Fractional max pooling (Graham, 2014): windows of one size, at places that ``random_samples`` choose. Its
gradient is that of every max pooling (`pooling.py`).
"""

from __future__ import annotations

import math

import jax.numpy as jnp

from tpu_backend.lowering.registry import lowering, opmath, stored


def _starts(sample, size: int, count: int, window: int):
    """Where the windows begin, (..., count), from a sample in [0, 1) (...): the last one ends at the end."""
    if count == 1:
        return jnp.full((*sample.shape, 1), size - window)
    dtype, wide = sample.dtype, opmath(sample.dtype)
    step = jnp.asarray((size - window) / (count - 1), dtype).astype(wide)
    sample = sample[..., None].astype(wide)

    def below(place):  # PyTorch rounds each step to the dtype of the sample, and a start may hang on it
        return jnp.trunc(stored(stored(place, dtype) * step, dtype))

    starts = below(jnp.arange(count) + sample) - below(sample)
    return starts.at[..., -1].set(size - window).astype(jnp.int32)


def _pool(self, kernel_size, output_size, samples):
    """(maxima, their places in the flattened plane); self is (N, C, *plane), samples (N, C, dims)."""
    plane, rank = self.shape[2:], len(kernel_size)
    # PyTorch's order of samples: height before width in 3d, the other way about in 2d
    order = range(rank) if rank == 3 else reversed(range(rank))
    places = jnp.zeros((1,) * (2 + 2 * rank), jnp.int32)
    for axis, number in enumerate(order):
        starts = _starts(samples[..., number], plane[axis], output_size[axis], kernel_size[axis])
        along = starts[..., None] + jnp.arange(kernel_size[axis])
        shape = [*starts.shape[:2], *(1,) * (2 * rank)]
        shape[2 + axis], shape[2 + rank + axis] = output_size[axis], kernel_size[axis]
        places = places * plane[axis] + along.reshape(shape)
    batch = self.shape[:2]
    places = jnp.broadcast_to(places, (*batch, *places.shape[2:])).reshape(
        *batch, math.prod(output_size), math.prod(kernel_size)
    )
    flat = self.reshape(*batch, 1, math.prod(plane))
    values = jnp.take_along_axis(flat, places, -1)
    best = jnp.argmax(values, -1, keepdims=True)  # the first; NaN wins
    return tuple(jnp.take_along_axis(array, best, -1)[..., 0] for array in (values, places))


@lowering("fractional_max_pool2d", "fractional_max_pool3d")
def fractional_max_pool(self, kernel_size, output_size, random_samples, *, out):
    if self.ndim == len(kernel_size) + 1:  # one sample, which takes the first of random_samples
        self, random_samples = self[None], random_samples[:1]
    values, places = _pool(self, kernel_size, output_size, random_samples)
    return values.reshape(out[0].shape), places.reshape(out[0].shape)
