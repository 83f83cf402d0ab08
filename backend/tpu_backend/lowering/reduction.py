"""Reductions: sums, extrema, moments and norms. 16-bit floats accumulate in float32."""

from __future__ import annotations

import math
from functools import partial

import jax.numpy as jnp
from jax import lax

from tpu_backend.lowering.dims import at_least_1d, reduced_dims, wrap_dim
from tpu_backend.lowering.few_numbers import sum_of
from tpu_backend.lowering.pointwise import logaddexp
from tpu_backend.lowering.registry import (
    CannotCompile,
    NotLoweredError,
    is_16_bit,
    lowering,
    opmath,
    stored,
)


@lowering("sum", "sum.dim_IntList", promote="result")
def sum_(self, dim=None, keepdim=False, *, dtype=None):
    dims = reduced_dims(dim, self.ndim)
    total = sum_of(self, dims)
    return jnp.expand_dims(total, dims) if keepdim else total


@lowering("nansum", promote="result")
def nansum(self, dim=None, keepdim=False, *, dtype=None):
    return sum_(jnp.where(jnp.isnan(self), 0, self), dim, keepdim)


@lowering("mean", "mean.dim", promote="result")
def mean(self, dim=None, keepdim=False, *, dtype=None):
    return jnp.mean(self, reduced_dims(dim, self.ndim), keepdims=keepdim)


@lowering("prod", "prod.dim_int", promote="result")
def prod(self, dim=None, keepdim=False, *, dtype=None, out):
    dims = reduced_dims(dim, self.ndim)
    if not is_16_bit(out[0].dtype):
        return jnp.prod(self, dims, keepdims=keepdim)
    product = lax.reduce(self, jnp.ones((), self.dtype), lambda a, b: stored(a * b, out[0].dtype), dims)
    return product.reshape(out[0].shape)


@lowering("count_nonzero", "count_nonzero.dim_IntList")
def count_nonzero(self, dim=None):
    return jnp.count_nonzero(self, axis=reduced_dims(dim, self.ndim))


@lowering("trace")
def trace(self, *, out):
    return jnp.trace(self, dtype=out[0].dtype)


# `self != 0`: JAX makes False of a complex number without real part.


@lowering("any", "any.dim", "any.dims")
def any_(self, dim=None, keepdim=False):
    return jnp.any(self != 0, _listed_dims(dim, self.ndim), keepdims=keepdim)


@lowering("all", "all.dim", "all.dims")
def all_(self, dim=None, keepdim=False):
    return jnp.all(self != 0, _listed_dims(dim, self.ndim), keepdims=keepdim)


def _listed_dims(dim, ndim):
    """any and all reduce over no dim at all when given an empty list."""
    return () if isinstance(dim, (list, tuple)) and len(dim) == 0 else reduced_dims(dim, ndim)


lowering("_is_any_true")(lambda self: jnp.any(self))
lowering("_is_all_true")(lambda self: jnp.all(self))

# ---- extrema; NaN wins in all of them, as in PyTorch


@lowering("amax", "max")
def amax(self, dim=(), keepdim=False):
    return jnp.max(self, reduced_dims(dim, self.ndim), keepdims=keepdim)


@lowering("amin", "min")
def amin(self, dim=(), keepdim=False):
    return jnp.min(self, reduced_dims(dim, self.ndim), keepdims=keepdim)


@lowering("aminmax")
def aminmax(self, *, dim=None, keepdim=False):
    return amin(self, dim, keepdim), amax(self, dim, keepdim)


@lowering("argmax")
def argmax(self, dim=None, keepdim=False):
    return _arg_extremum(jnp.argmax, self, dim, keepdim)


@lowering("argmin")
def argmin(self, dim=None, keepdim=False):
    return _arg_extremum(jnp.argmin, self, dim, keepdim)


def _arg_extremum(find, self, dim, keepdim):
    if self.ndim == 0:
        return jnp.zeros((), jnp.int64)
    return find(self, axis=None if dim is None else wrap_dim(dim, self.ndim), keepdims=keepdim)


@lowering("max.dim")
def max_dim(self, dim, keepdim=False):
    return amax(self, dim, keepdim), argmax(self, dim, keepdim)


@lowering("min.dim")
def min_dim(self, dim, keepdim=False):
    return amin(self, dim, keepdim), argmin(self, dim, keepdim)


# ---- moments


def _moments(self, dim, correction, keepdim):
    """Variance (two passes, as accurate as Welford) and mean; correction None means 1."""
    dims = reduced_dims(dim, self.ndim)
    count = math.prod(self.shape[axis] for axis in dims)
    average = jnp.mean(self, dims, keepdims=True)
    squares = jnp.sum(jnp.square(jnp.abs(self - average)), dims, keepdims=keepdim)
    # PyTorch: max(0, count - correction), so that too few elements give NaN or inf and no negative variance.
    variance = squares / jnp.asarray(max(count - (1 if correction is None else correction), 0), squares.dtype)
    return variance, average if keepdim else average.squeeze(dims)


@lowering("var.correction", promote="opmath", static=("correction",))
def var(self, dim=None, *, correction=None, keepdim=False):
    return _moments(self, dim, correction, keepdim)[0]


@lowering("std.correction", promote="opmath", static=("correction",))
def std(self, dim=None, *, correction=None, keepdim=False):
    return jnp.sqrt(_moments(self, dim, correction, keepdim)[0])


@lowering("var_mean.correction", promote="opmath", static=("correction",))
def var_mean(self, dim=None, *, correction=None, keepdim=False):
    return _moments(self, dim, correction, keepdim)


@lowering("std_mean.correction", promote="opmath", static=("correction",))
def std_mean(self, dim=None, *, correction=None, keepdim=False):
    variance, average = _moments(self, dim, correction, keepdim)
    return jnp.sqrt(variance), average


# ---- hashes

_NO_BITS_OF_FLOATS = CannotCompile(
    "INVALID_ARGUMENT: binary op with different element types, s32 and u32, from bit operations on float64",
    frozenset({"float16", "bfloat16", "float32", "float64"}),
)


@lowering("hash_tensor", on_tpu=_NO_BITS_OF_FLOATS)
def hash_tensor(self, dim=(), *, keepdim=False, mode=0):
    """The exclusive or of the bits that the numbers have in float64 or int64."""
    if mode != 0:
        raise NotLoweredError("a mode that PyTorch refuses, in its own words on the CPU")
    dims = reduced_dims(dim, self.ndim)
    wide = jnp.float64 if jnp.issubdtype(self.dtype, jnp.floating) else jnp.int64
    bits = lax.bitcast_convert_type(self.astype(wide), jnp.uint64)
    result = lax.reduce(bits, jnp.zeros((), jnp.uint64), lax.bitwise_xor, dims)
    return jnp.expand_dims(result, dims) if keepdim else result


# ---- norms


@lowering("linalg_vector_norm", static=("ord",))
def vector_norm(self, ord=2, dim=None, keepdim=False, *, dtype=None, out=None):
    dims = reduced_dims(dim, self.ndim)
    if jnp.iscomplexobj(self):
        self = jnp.abs(self)
    self = self.astype(opmath(out[0].dtype))
    if ord == 2:
        return jnp.sqrt(jnp.sum(self * self, dims, keepdims=keepdim))
    magnitude = jnp.abs(self)
    if ord == math.inf:
        return jnp.max(magnitude, dims, keepdims=keepdim, initial=0)
    if ord == -math.inf:
        return jnp.min(magnitude, dims, keepdims=keepdim)
    if ord == 0:
        return jnp.sum((magnitude != 0).astype(magnitude.dtype), dims, keepdims=keepdim)
    if ord == 1:
        return jnp.sum(magnitude, dims, keepdims=keepdim)
    return jnp.power(jnp.sum(jnp.power(magnitude, ord), dims, keepdims=keepdim), 1 / ord)


@lowering("linalg__powsum", static=("ord",))
def powsum(self, ord=2, dim=None, keepdim=False, *, dtype=None, out=None):
    magnitude = jnp.abs(self).astype(opmath(out[0].dtype))
    return jnp.sum(jnp.power(magnitude, ord), reduced_dims(dim, self.ndim), keepdims=keepdim)


@lowering(
    "norm.Scalar", "norm.ScalarOpt_dim", "norm.ScalarOpt_dim_dtype", "norm.ScalarOpt_dtype", static=("p",)
)
def norm(self, p=2, dim=None, keepdim=False, *, dtype=None, out=None):
    return vector_norm(self, 2 if p is None else p, dim, keepdim, out=out)


@lowering("logsumexp", promote="result")
def logsumexp(self, dim, keepdim=False, *, out):
    rounded = partial(stored, dtype=out[0].dtype)  # PyTorch's is made of operators
    dims = reduced_dims(dim, self.ndim)
    # PyTorch takes the real parts of complex numbers: any shift of that size keeps exp() finite.
    largest = jnp.max(self.real, dims, keepdims=True, initial=-jnp.inf)
    largest = jnp.where(jnp.isfinite(largest), largest, 0)
    total = rounded(jnp.sum(rounded(jnp.exp(rounded(self - largest))), dims, keepdims=True))
    total = rounded(jnp.log(total)) + largest
    return total if keepdim else total.squeeze(dims)


@lowering("renorm", static=("p",))
def renorm(self, p, dim, maxnorm):
    others = tuple(axis for axis in range(self.ndim) if axis != wrap_dim(dim, self.ndim))
    norms = vector_norm(self, p, others, True, out=(jnp.real(self),))
    maxnorm = jnp.asarray(maxnorm, norms.dtype)
    return self * jnp.where(norms > maxnorm, maxnorm / (norms + 1e-7), 1)


# ---- running reductions


@lowering("cumsum", promote="result")
def cumsum(self, dim, *, dtype=None):
    return _running(jnp.cumsum, self, dim)


@lowering("cumprod", promote="result")
def cumprod(self, dim, *, dtype=None):
    return _running(jnp.cumprod, self, dim)


@lowering("logcumsumexp", "_logcumsumexp", promote="result")
def logcumsumexp(self, dim):
    # The imaginary parts of complex ones wind up, which a sum of exp() would forget.
    scan = _complex_logcumsumexp if jnp.iscomplexobj(self) else _logcumsumexp
    return _running(scan, self, dim)


def _logcumsumexp(values, axis):
    """Running maxima with sums of exp() under them, and one logarithm at the end: a chain of them rounds."""

    def join(left, right):
        (top, total), (other_top, other_total) = left, right
        highest = jnp.maximum(top, other_top)
        shift = jnp.where(jnp.isfinite(highest), highest, 0)
        return highest, total * jnp.exp(top - shift) + other_total * jnp.exp(other_top - shift)

    top, total = lax.associative_scan(join, (values, jnp.ones_like(values)), axis=axis)
    return top + jnp.log(total)


def _complex_logcumsumexp(values, axis):
    """One after the other, as on the CPU: how often the imaginary part winds depends on the order."""

    def step(total, value):
        total = logaddexp(total, value)
        return total, total

    values = jnp.moveaxis(values, axis, 0)
    if values.shape[0] > 0:
        rest = lax.scan(step, values[0], values[1:])[1]
        values = jnp.concatenate([values[:1], rest])
    return jnp.moveaxis(values, 0, axis)


@lowering("cummax")
def cummax(self, dim):
    return _running_extremum(self, dim, lambda new, old: new >= old)


@lowering("cummin")
def cummin(self, dim):
    return _running_extremum(self, dim, lambda new, old: new <= old)


def _running(function, self, dim):
    return function(at_least_1d(self), axis=wrap_dim(dim, self.ndim)).reshape(self.shape)


def _running_extremum(self, dim, replaces):
    """Values and positions of the best element so far; the last of equals wins, and NaN stays."""
    values, axis = at_least_1d(self), wrap_dim(dim, self.ndim)
    positions = lax.broadcasted_iota(jnp.int64, values.shape, axis)

    def pick(old, new):
        take_new = replaces(new[0], old[0]) | jnp.isnan(new[0])
        take_new &= ~jnp.isnan(old[0]) | jnp.isnan(new[0])
        return jnp.where(take_new, new[0], old[0]), jnp.where(take_new, new[1], old[1])

    best, where = lax.associative_scan(pick, (values, positions), axis=axis)
    return best.reshape(self.shape), where.reshape(self.shape)
