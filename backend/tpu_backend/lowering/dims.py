"""PyTorch's conventions for dimension arguments: negative or missing dims, 0-d tensors that accept dim 0."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from tpu_backend.lowering.registry import NotLoweredError


def wrap_dim(dim: int, ndim: int) -> int:
    """``dim`` in 0..ndim-1; a 0-d tensor counts as 1-d, as in PyTorch.

    Raises NotLoweredError where there is no such dim.
    """
    num_dims = max(ndim, 1)
    if not -num_dims <= dim < num_dims:
        raise NotLoweredError("no such dim: PyTorch refuses it, in its own words on the CPU")
    return dim % num_dims


def reduced_dims(dim: int | Sequence[int] | None, ndim: int) -> tuple[int, ...]:
    """The axes a reduction runs over: all for None and for an empty list, none for a 0-d tensor."""
    if ndim == 0:
        return ()
    if dim is None:
        return tuple(range(ndim))
    if isinstance(dim, int):
        return (dim % ndim,)
    return tuple(sorted(entry % ndim for entry in dim)) or tuple(range(ndim))


def at_least_1d(value: jax.Array) -> jax.Array:
    """A 0-d tensor as one element, so that dim 0 exists; undone by the reshape to the output's shape."""
    return value.reshape(1) if value.ndim == 0 else value
