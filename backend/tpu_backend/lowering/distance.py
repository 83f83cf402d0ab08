"""Distances between points in the p-norm, and their gradients; a gradient at distance 0 is 0."""

from __future__ import annotations

import math

import jax.numpy as jnp

from tpu_backend.lowering.registry import lowering


def _distance(difference, p):
    magnitude = jnp.abs(difference)
    if p == 0:
        return jnp.sum((magnitude != 0).astype(magnitude.dtype), -1)
    if p == 1:
        return jnp.sum(magnitude, -1)
    if p == 2:
        return jnp.sqrt(jnp.sum(magnitude * magnitude, -1))
    if p == math.inf:
        return jnp.max(magnitude, -1, initial=0)
    return jnp.power(jnp.sum(jnp.power(magnitude, p), -1), 1 / p)


def _difference_grad(grad, difference, distance, p):
    """The gradient of ``_distance`` with respect to each difference."""
    grad, distance = grad[..., None], distance[..., None]
    if p == 0:
        return jnp.zeros_like(difference)
    if p == 1:
        return grad * jnp.sign(difference)
    magnitude = jnp.abs(difference)
    if p == math.inf:
        return jnp.where(magnitude == distance, grad * jnp.sign(difference), 0)
    safe = jnp.where(distance == 0, 1, distance)
    if p == 2:
        result = grad * difference / safe
    else:
        base = jnp.where(magnitude == 0, 1, magnitude)
        result = grad * jnp.sign(difference) * jnp.power(base, p - 1) / jnp.power(safe, p - 1)
    return jnp.where(distance == 0, 0, result)


@lowering("_cdist_forward", one_dtype=("x1", "x2"))
def cdist(x1, x2, p, compute_mode):
    return _distance(x1[..., :, None, :] - x2[..., None, :, :], p)


@lowering("_cdist_backward")
def cdist_backward(grad, x1, x2, p, cdist, *, out):
    difference = x1[..., :, None, :] - x2[..., None, :, :]
    result = jnp.sum(_difference_grad(grad, difference, cdist, p), -2)
    if result.size == 0:  # PyTorch then gives it the shape of x1, and else that of the broadcast batch
        return jnp.zeros(out[0].shape, result.dtype)
    return result.reshape(out[0].shape)


def _pairs(count):
    return jnp.triu_indices(count, 1)


@lowering("_pdist_forward")
def pdist(self, p=2.0):
    rows, columns = _pairs(self.shape[0])
    return _distance(self[rows] - self[columns], p)


@lowering("_pdist_backward")
def pdist_backward(grad, self, p, pdist):
    rows, columns = _pairs(self.shape[0])
    of_pair = _difference_grad(grad, self[rows] - self[columns], pdist, p)
    return jnp.zeros_like(self).at[rows].add(of_pair).at[columns].add(-of_pair)
