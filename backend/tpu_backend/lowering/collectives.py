"""Collectives, for one rank of a group: programs that hold one are compiled for the mesh of the group.

Each value is the rank's own. `ranks` are those of the group in the world, in the order of the group. The
mesh has them along `AXIS`, or along what `axes_in_mesh` says.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax._src.core import extend_axis_env_nd

from tpu_backend.lowering.registry import lowering

AXIS = "ranks"
NAMESPACE = "tpu_collective"


@contextmanager
def axis_of(ranks: Sequence[int]) -> Iterator[None]:
    """In here a lowering can be traced on shapes alone, outside of any program."""
    with extend_axis_env_nd([(AXIS, len(ranks))]):
        yield


_axes: ContextVar[Mapping[tuple[int, ...], tuple[str, ...]]] = ContextVar("axes of groups")


@contextmanager
def axes_in_mesh(axes: Mapping[tuple[int, ...], tuple[str, ...]]) -> Iterator[None]:
    """In here programs are lowered for a mesh that has these groups along these axes."""
    before = _axes.set(axes)
    try:
        yield
    finally:
        _axes.reset(before)


def _axis(ranks: Sequence[int]) -> Any:
    return _axes.get({}).get(tuple(ranks), AXIS)


def _reduced(value: jax.Array, reduce: str, axis: Any) -> jax.Array:
    """Over the ranks along an axis."""
    if reduce == "sum":
        return lax.psum(value, axis)
    if reduce == "avg":
        return lax.pmean(value, axis)
    if reduce in ("min", "max") and not jnp.issubdtype(value.dtype, jnp.complexfloating):
        # XLA's minimum leaves open whether a NaN wins; PyTorch's keeps it.
        return {"min": lax.pmin, "max": lax.pmax}[reduce](value, axis)
    every = lax.all_gather(value, axis)
    combiners: dict[str, Callable[[Any, Any], Any]] = {
        "product": operator.mul,
        "band": operator.and_,
        "bor": operator.or_,
        "bxor": operator.xor,
        "min": jnp.minimum,
        "max": jnp.maximum,
    }
    return functools.reduce(combiners[reduce], [every[rank] for rank in range(every.shape[0])])


@lowering(f"{NAMESPACE}::all_reduce")
def all_reduce(self, reduce, ranks):
    if self.dtype == jnp.bool_:  # as numbers, of which anything but 0 is true
        return _reduced(self.astype(jnp.int32), reduce, _axis(ranks)) != 0
    return _reduced(self, reduce, _axis(ranks))


@lowering(f"{NAMESPACE}::all_gather")
def all_gather(self, ranks):
    if self.ndim == 0:
        self = self[None]
    return lax.all_gather(self, _axis(ranks), tiled=True)


def _reduce_scatter_by_exchange(self, reduce, ranks):
    """XLA's own on the CPU is slower, and wrong for large chunks (jax-ml/jax#40830)."""
    parts = self.reshape(len(ranks), self.shape[0] // len(ranks), *self.shape[1:])
    mine = lax.all_to_all(parts, _axis(ranks), 0, 0)
    if reduce == "avg":
        return jnp.mean(mine, 0)
    if reduce == "sum":
        return jnp.sum(mine, 0, dtype=self.dtype)
    combine = {"min": jnp.min, "max": jnp.max, "product": jnp.prod}[reduce]
    return combine(mine, 0)


@lowering(f"{NAMESPACE}::reduce_scatter", on={"cpu": _reduce_scatter_by_exchange})
def reduce_scatter(self, reduce, ranks):
    if reduce in ("sum", "avg"):
        result = lax.psum_scatter(self, _axis(ranks), tiled=True)
        return result / len(ranks) if reduce == "avg" else result
    return _reduce_scatter_by_exchange(self, reduce, ranks)


@lowering(f"{NAMESPACE}::all_to_all")
def all_to_all(self, ranks):
    return lax.all_to_all(self, _axis(ranks), 0, 0, tiled=True)


def _bits(value: jax.Array) -> jax.Array:
    if value.dtype == jnp.bool_:
        return value.astype(jnp.uint8)
    if jnp.issubdtype(value.dtype, jnp.complexfloating):
        value = jnp.stack([value.real, value.imag])
    return lax.bitcast_convert_type(value, jnp.dtype(f"uint{8 * value.dtype.itemsize}"))


def _of_bits(bits: jax.Array, dtype: jnp.dtype) -> jax.Array:
    if dtype == jnp.bool_:
        return bits != 0
    if jnp.issubdtype(dtype, jnp.complexfloating):
        part = jnp.float32 if dtype == jnp.complex64 else jnp.float64
        real, imag = lax.bitcast_convert_type(bits, part)
        return lax.complex(real, imag)
    return lax.bitcast_convert_type(bits, dtype)


@lowering(f"{NAMESPACE}::broadcast")
def broadcast(self, root, ranks):
    """To the bit: -0.0 and a NaN's payload arrive as they are."""
    mine = jnp.where(lax.axis_index(_axis(ranks)) == root, _bits(self), 0)
    return _of_bits(lax.psum(mine, _axis(ranks)), self.dtype)


@lowering(f"{NAMESPACE}::send_receive")
def send_receive(self, source, ranks):
    """From one of two ranks to the other, which gives a tensor of the same form."""
    return lax.ppermute(self, _axis(ranks), [(source, 1 - source)])
