"""Random numbers: pure functions of a key, the same bits in whatever program they are part of.

Two things could change the bits of a float between programs. A scale and shift could be contracted into one
fused multiply-add, or with the arithmetic of whoever consumes the number; ``_rounded`` prevents both on every
platform. And the values could be recomputed inside a consumer; the optimization barrier prevents that where
XLA honours it. Integers and masks are exact whatever happens and need neither.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax

from tpu_backend.lowering.bounds import require_all
from tpu_backend.lowering.registry import NotLoweredError, lowering, opmath


def _rounded(value: jax.Array) -> jax.Array:
    """The value itself, rounded to its dtype: a maximum that no compiler may look through or contract."""
    return jnp.maximum(value, jnp.finfo(value.dtype).min)


def _scaled(noise, scale, shift):
    scale, shift = (jnp.asarray(value).astype(noise.dtype) for value in (scale, shift))
    return _rounded(_rounded(noise * scale) + shift)


def _final(value):
    return lax.optimization_barrier(_rounded(value))


def _float_dtype(spec):
    """The dtype to draw in: float32 at least."""
    return opmath(spec.dtype)


def _unit(key, spec):
    """Uniform in [0, 1). Drawn in the output's own precision, so that rounding never yields 1."""
    return jax.random.uniform(key, spec.shape, spec.dtype).astype(_float_dtype(spec))


def _open_unit(key, spec):
    """Uniform in (0, 1), for logarithms."""
    dtype = _float_dtype(spec)
    return jax.random.uniform(key, spec.shape, dtype, minval=jnp.finfo(dtype).tiny)


def _standard_normal(key, spec):
    # Rounded here too: it ends in a multiplication by sqrt(2) that a constant scale would be folded into.
    return _rounded(jax.random.normal(key, spec.shape, _float_dtype(spec)))


# ---- in place on a tensor: `self` gives shape and dtype only


@lowering("uniform", runtime=("from", "to"))
def uniform(_self, from_=0.0, to=1.0, *, generator=None, key, out):
    if jnp.issubdtype(out[0].dtype, jnp.complexfloating):
        # PyTorch fills the real and the imaginary parts as one real tensor.
        parts = jax.ShapeDtypeStruct((*out[0].shape, 2), jnp.finfo(out[0].dtype).dtype)
        drawn = uniform(None, from_, to, key=key, out=(parts,))
        return lax.complex(drawn[..., 0], drawn[..., 1])
    low, high = (jnp.asarray(value).astype(_float_dtype(out[0])) for value in (from_, to))
    return _final(_scaled(_unit(key, out[0]), high - low, low))


@lowering("normal_functional", runtime=("mean", "std"))
def normal(_self, mean=0.0, std=1.0, *, generator=None, key, out):
    if jnp.issubdtype(out[0].dtype, jnp.complexfloating):
        # PyTorch fills the real and the imaginary parts as one real tensor.
        mean = jnp.asarray(mean).astype(out[0].dtype) * (1 + 1j)
    return _final(_scaled(_standard_normal(key, out[0]), std, mean))


@lowering("log_normal", runtime=("mean", "std"))
def log_normal(_self, mean=1.0, std=2.0, *, generator=None, key, out):
    return _final(jnp.exp(_scaled(_standard_normal(key, out[0]), std, mean)))


@lowering("exponential", runtime=("lambd",))
def exponential(_self, lambd=1.0, *, generator=None, key, out):
    noise = -jnp.log(_open_unit(key, out[0]))
    return _final(jnp.maximum(noise / jnp.asarray(lambd).astype(noise.dtype), jnp.finfo(out[0].dtype).tiny))


@lowering("geometric", runtime=("p",))
def geometric(_self, p, *, generator=None, key, out):
    spec = jax.ShapeDtypeStruct(out[0].shape, jnp.float32)
    p = jnp.asarray(p).astype(jnp.float32)
    return lax.optimization_barrier(jnp.ceil(jnp.log(_open_unit(key, spec)) / jnp.log1p(-p)))


@lowering("cauchy", runtime=("median", "sigma"))
def cauchy(_self, median=0.0, sigma=1.0, *, generator=None, key, out):
    noise = jnp.tan(math.pi * _rounded(_open_unit(key, out[0]) - 0.5))
    return _final(_scaled(noise, sigma, median))


@lowering("bernoulli.p", runtime=("p",))
def bernoulli_p(_self, p, *, generator=None, key, out):
    return coin(key, jnp.asarray(p).astype(jnp.float32), out[0].shape)


@lowering("bernoulli.Tensor")
def bernoulli_tensor(_self, p, *, generator=None, key, out):
    _require_probabilities(p)
    return coin(key, p.astype(jnp.float32), out[0].shape)


@lowering("bernoulli")
def bernoulli(self, *, generator=None, key):
    _require_probabilities(self)
    return coin(key, self.astype(jnp.float32), self.shape)


def _require_probabilities(p):
    within = (p >= 0) & (p <= 1)
    require_all(within, RuntimeError, "Expected p_in >= 0 && p_in <= 1 to be true, but got false.")


def coin(key, p, shape):
    """True with the probability `p`, float32."""
    return jax.random.uniform(key, shape, jnp.float32) < p


# ---- integers

_EXACT_INTEGERS = {"bfloat16": 2**8, "float16": 2**11, "float32": 2**24, "float64": 2**53}


@lowering("random")
def random(self, *, generator=None, key, out):
    """Every non-negative value of an integer dtype; every integer up to which a float dtype is exact."""
    dtype = out[0].dtype
    if dtype == jnp.bool_:
        return coin(key, 0.5, self.shape)
    if jnp.issubdtype(dtype, jnp.floating):
        return jax.random.randint(key, self.shape, 0, _EXACT_INTEGERS[dtype.name] + 1, jnp.int64)
    return _non_negative(key, self.shape, dtype)


def _non_negative(key, shape, dtype):
    unsigned = jnp.dtype(f"uint{8 * jnp.dtype(dtype).itemsize}")
    bits = jax.random.bits(key, shape, unsigned)
    return (bits >> 1 if jnp.issubdtype(dtype, jnp.signedinteger) else bits).astype(dtype)


@lowering("random.to", runtime=("to",))
def random_to(self, to, *, generator=None, key):
    return jax.random.randint(key, self.shape, 0, to, jnp.int64)


@lowering("random.from", runtime=("from", "to"))
def random_from(self, from_, to, *, generator=None, key, out):
    if to is None:  # up to the largest value of the dtype, inclusive
        dtype = out[0].dtype
        largest = _EXACT_INTEGERS.get(dtype.name) or jnp.iinfo(dtype).max
        return jax.random.randint(key, self.shape, from_, largest, jnp.int64)
    return jax.random.randint(key, self.shape, from_, to, jnp.int64)


@lowering("randperm", "randperm.out", "randperm.generator_out")
def randperm(n, *, generator=None, key, out, **options):
    return jax.random.permutation(key, n)


# ---- distributions whose parameters are tensors


@lowering("normal.Tensor_float", promote="result", runtime=("std",))
def normal_of(mean, std=1.0, *, generator=None, key, out):
    return _final(_scaled(_standard_normal(key, out[0]), std, mean))


@lowering("normal.Tensor_Tensor", "normal.float_Tensor", promote="result", runtime=("mean",))
def normal_of_tensors(mean, std, *, generator=None, key, out):
    require_all(std >= 0, RuntimeError, "normal expects all elements of std >= 0.0")
    return normal_of(mean, std, key=key, out=out)


@lowering("poisson", promote="opmath")
def poisson(self, generator=None, *, key):
    require_all(self >= 0, RuntimeError, "invalid Poisson rate, expected rate to be non-negative")
    return jax.random.poisson(key, self, dtype=jnp.int32)


@lowering("binomial", promote="opmath")
def binomial(count, prob, generator=None, *, key):
    """Of no count or a chance of at most 0 come 0, of a chance of at least 1 the count, as on the CPU."""
    drawn = (count > 0) & jnp.isfinite(count) & (prob > 0) & (prob < 1)
    draws = jax.random.binomial(key, jnp.where(drawn, count, 1), jnp.where(drawn, prob, 0.5))
    certain = jnp.where((count <= 0) | (prob <= 0), 0, jnp.where(prob >= 1, count, jnp.nan))
    return jnp.where(drawn, draws, certain)


@lowering("_standard_gamma", promote="opmath")
def standard_gamma(self, generator=None, *, key):
    return _final(jax.random.gamma(key, self, dtype=self.dtype))


@lowering("_sample_dirichlet", promote="opmath")
def sample_dirichlet(self, generator=None, *, key):
    return _final(jax.random.dirichlet(key, self, dtype=self.dtype))


@lowering("multinomial", promote="opmath")
def multinomial(self, num_samples, replacement=False, *, generator=None, key):
    weights = jnp.atleast_2d(self)
    require_all(
        jnp.isfinite(weights) & (weights >= 0),
        RuntimeError,
        "probability tensor contains either `inf`, `nan` or element < 0",
    )
    require_all(
        jnp.sum(weights, -1) > 0,
        RuntimeError,
        "invalid multinomial distribution (sum of probabilities <= 0)",
    )
    if replacement:
        cumulative = jnp.cumsum(weights, -1)
        points = jax.random.uniform(key, (weights.shape[0], num_samples), weights.dtype) * cumulative[:, -1:]
        picked = jnp.sum(cumulative[:, None, :] <= points[:, :, None], -1)
        last = weights.shape[1] - 1 - jnp.argmax(jnp.flip(weights > 0, -1), -1, keepdims=True)
        picked = jnp.minimum(picked, last)  # rounding may put a point on the total
    elif num_samples > weights.shape[1]:
        raise NotLoweredError("more samples than there are: PyTorch refuses it, in its own words on the CPU")
    else:
        race = weights / jnp.maximum(jax.random.exponential(key, weights.shape, weights.dtype), 1e-30)
        picked = lax.top_k(race, num_samples)[1]
    return picked if self.ndim == 2 else picked[0]


# ---- dropout and its kin


@lowering("native_dropout", promote="opmath")
def native_dropout(input, p, train, *, key):
    if train is False:
        return input, jnp.ones(input.shape, bool)
    if p in (0, 1):
        return input * (1 - p), jnp.full(input.shape, p == 0)
    mask = coin(key, 1 - p, input.shape)
    return input * jnp.where(mask, jnp.asarray(1 / (1 - p), input.dtype), jnp.zeros((), input.dtype)), mask


@lowering("rrelu_with_noise_functional", promote="opmath", static=("lower", "upper"))
def rrelu_with_noise(self, noise, lower=0.125, upper=1 / 3, training=False, generator=None, *, key):
    """(output, new noise)."""
    if not training:
        return jnp.where(self <= 0, self * ((lower + upper) / 2), self), noise
    slopes = _final(_scaled(jax.random.uniform(key, self.shape, self.dtype), upper - lower, lower))
    noise = jnp.where(self <= 0, slopes, 1)
    return self * noise, noise
