"""Tensors out of nothing: fills, ranges, triangles' indices. Sizes come from the outputs PyTorch inferred."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jax import lax

from tpu_backend.lowering.registry import NotLoweredError, lowering, opmath, stored


@lowering("fill.Scalar", fits={"value": "result"})
@lowering("fill.Tensor")
def fill(_self, value, *, out):
    return jnp.broadcast_to(jnp.asarray(value).astype(out[0].dtype), out[0].shape)


@lowering("zero")
def zero(_self, *, out):
    return jnp.zeros(out[0].shape, out[0].dtype)


@lowering("full", "new_full", "full_like", fits={"fill_value": "result"})
@lowering("scalar_tensor", fits={"s": "result"})
def full(*args, out=None, **options):
    """The fill value is the last positional argument of each of them."""
    return jnp.broadcast_to(jnp.asarray(args[-1]).astype(out[0].dtype), out[0].shape)


@lowering("zeros", "new_zeros", "zeros_like")
def zeros(*args, out=None, **options):
    return jnp.zeros(out[0].shape, out[0].dtype)


@lowering("ones", "new_ones", "ones_like")
def ones(*args, out=None, **options):
    return jnp.ones(out[0].shape, out[0].dtype)


@lowering("_to_copy")
def to_copy(self, *, out=None, **options):
    return self  # the cast is the table's


# ---- ranges


def spaced(start, step, out):
    """start + i * step, computed in the accumulation dtype as PyTorch's range kernels do.

    An `out=` of as many elements keeps its shape, here and in linspace and logspace.
    """
    shape, dtype = out[0].shape, out[0].dtype
    if dtype == jnp.bool_ or jnp.issubdtype(dtype, jnp.complexfloating):
        raise NotLoweredError("a range that PyTorch refuses, in its own words on the CPU")
    compute = opmath(dtype)
    steps = lax.iota(compute, math.prod(shape)).reshape(shape)
    return jnp.asarray(start).astype(compute) + steps * jnp.asarray(step).astype(compute)


# The numbers of a range make its length, so they are part of the program. (A range that starts elsewhere is
# made of this one, see csrc/aten/composites.cpp.)


@lowering("arange", "arange.out", static=("end",))
def arange(end, *, out=None, **options):
    return spaced(0, 1, out)


@lowering("range.step", "range.out", static=("start", "end", "step"))
def range_(start, end, step=1, *, out=None, **options):
    return spaced(start, step, out)


_OVERLOADS = [
    (name, name + ".out" if "." not in name else name + "_out")
    for name in ("linspace", "linspace.Tensor_Tensor", "linspace.Tensor_Scalar", "linspace.Scalar_Tensor")
]


def _spaced(start, end, steps, dtype, kept=None):
    """Counted from both ends, so that start and end are met exactly; ``kept``: the dtype that each step on
    the way is rounded to, in 16 bit.
    """
    compute = opmath(dtype)
    start, end = (jnp.asarray(value).astype(compute) for value in (start, end))
    positions = lax.iota(compute, steps)
    if jnp.issubdtype(dtype, jnp.integer):
        positions, start, end = (value.astype(jnp.float64) for value in (positions, start, end))
    if steps < 2:
        return jnp.broadcast_to(start, (steps,))
    start, end = stored(start, dtype), stored(end, dtype)
    kept = compute if kept is None else kept

    def along(step, count):
        return stored(step * stored(count, kept), kept)

    # Behind the barrier: XLA multiplies by the inverse of a constant, which is not exact.
    last = lax.optimization_barrier(stored(jnp.asarray(steps - 1, start.dtype), kept))
    step = stored(stored(end - start, kept) / last, kept)
    return jnp.where(
        positions < steps // 2, start + along(step, positions), end - along(step, steps - 1 - positions)
    )


@lowering(*(name for pair in _OVERLOADS for name in pair), fits={"start": "result", "end": "result"})
def linspace(start, end, steps, *, out=None, **options):
    return _spaced(start, end, steps, out[0].dtype, kept=out[0].dtype).reshape(out[0].shape)


@lowering(
    *(name.replace("linspace", "logspace") for pair in _OVERLOADS for name in pair),
    fits={"start": "result", "end": "result"},
)
def logspace(start, end, steps, base=10.0, *, out=None, **options):
    exponents = _spaced(start, end, steps, out[0].dtype).reshape(out[0].shape)
    return jnp.power(jnp.asarray(base, exponents.dtype), exponents)


# ---- matrices


@lowering("eye", "eye.out")
def eye(n, *, out=None, **options):
    return jnp.eye(n, dtype=bool)


@lowering("eye.m", "eye.m_out")
def eye_m(n, m, *, out=None, **options):
    return jnp.eye(n, m, dtype=bool)


@lowering("tril_indices", "tril_indices.out")
def tril_indices(row, col, offset=0, **options):
    return jnp.asarray(np.stack(np.tril_indices(row, offset, col)))


@lowering("triu_indices", "triu_indices.out")
def triu_indices(row, col, offset=0, **options):
    return jnp.asarray(np.stack(np.triu_indices(row, offset, col)))
