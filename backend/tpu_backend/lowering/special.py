"""Elementwise special functions: error, gamma and Bessel functions, entropies and their relatives."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import jax.numpy as jnp
from jax import lax
from jax.scipy import special

from tpu_backend.lowering.registry import lowering, stored

_UNARY = {
    "erf": special.erf,
    "erfc": special.erfc,
    "i0": special.i0,
    "special_i0e": special.i0e,
    "special_i1": special.i1,
    "special_i1e": special.i1e,
    "special_modified_bessel_i0": special.i0,
    "special_modified_bessel_i1": special.i1,
    "special_ndtri": special.ndtri,
    "special_log_ndtr": special.log_ndtr,
    "sinc": jnp.sinc,
}
for _name, _function in _UNARY.items():
    lowering(_name, promote="result")(cast(Callable[..., Any], _function))


@lowering("erfinv", promote="result")
def erfinv(self):
    """Newton steps mend last digits, which its derivative multiplies close to 1; erfc has them there."""
    target = jnp.abs(self)
    root = special.erfinv(target)
    for _ in range(2):
        residual = jnp.where(target > 0.5, (1 - target) - special.erfc(root), special.erf(root) - target)
        slope = 2 / math.sqrt(math.pi) * jnp.exp(-root * root)
        root = jnp.where(jnp.isfinite(root), root - residual / slope, root)
    return root * lax.sign(self)  # copysign in float64 is what XLA:TPU does not compile


@lowering("digamma", promote="result")
def digamma(self):
    return jnp.where(self == 0, -1 / self, special.digamma(self))


@lowering("lgamma", promote="result")
def lgamma(self):
    return jnp.where((self == 1) | (self == 2), 0, lax.lgamma(self))  # XLA's are not quite 0


@lowering("special_entr", promote="result")
def entr(self):
    return jnp.where(self == 0, 0, special.entr(self))  # not -0


@lowering("logit", promote="result")
def logit(self, eps=None, *, out):
    if eps is not None:
        self = jnp.clip(self, eps, 1 - eps)
    dtype = out[0].dtype
    return jnp.log(stored(self / stored(1 - self, dtype), dtype))


@lowering("logit_backward", promote="result")
def logit_backward(grad_output, self, eps=None):
    grad = grad_output / (self * (1 - self))
    if eps is None:
        return jnp.where((self < 0) | (self > 1), jnp.nan, grad)
    return jnp.where((self < eps) | (self > 1 - eps), 0, grad)


def _times_logarithm(self, other, logarithm, dtype):
    """PyTorch's kernels, CUDA's too, round the logarithm before they multiply by it."""
    product = self * stored(logarithm, dtype)
    return jnp.where(jnp.isnan(other), jnp.nan, jnp.where(self == 0, 0, product))


@lowering("xlogy.Tensor", "xlogy.Scalar_Self", "xlogy.Scalar_Other", promote="result")
def xlogy(self, other, *, out):
    return _times_logarithm(self, other, jnp.log(other), out[0].dtype)


@lowering("special_xlog1py", "special_xlog1py.self_scalar", "special_xlog1py.other_scalar", promote="result")
def xlog1py(self, other, *, out):
    return _times_logarithm(self, other, jnp.log1p(other), out[0].dtype)


@lowering("igamma", promote="result")
def igamma(self, other):
    return special.gammainc(self, other)


@lowering("igammac", promote="result")
def igammac(self, other):
    return special.gammaincc(self, other)


@lowering("special_zeta", "special_zeta.self_scalar", "special_zeta.other_scalar", promote="result")
def zeta(self, other):
    """Hurwitz's zeta function, by Euler and Maclaurin's formula (DLMF 25.11.5): JAX's own is wrong below -8.

    ``self`` is the exponent. Sums 1 / (other + k)^self until the terms left are smooth.
    """
    exponent, start = jnp.broadcast_arrays(self, other)
    pole = (start <= 0) & (start == jnp.floor(start))
    undefined = (exponent < 1) | ((start <= 0) & (exponent != jnp.floor(exponent)))
    summed = (exponent > 1) & ~pole & ~undefined

    def unfinished(place, count):
        return summed & ((count < 9) | (place <= 9))

    def add_term(state):
        total, place, count = state
        more = unfinished(place, count)
        total = jnp.where(more, total + jnp.power(place, -exponent), total)
        return total, jnp.where(more, place + 1, place), count + 1

    state = jnp.zeros_like(start), jnp.where(summed, start, 10), jnp.zeros((), jnp.int32)
    total, place, _ = lax.while_loop(lambda state: jnp.any(unfinished(state[1], state[2])), add_term, state)
    term = jnp.power(place, -exponent)
    total += term * place / (exponent - 1) + term / 2
    rising = exponent * term / place
    for k, bernoulli in enumerate(_BERNOULLI, start=1):
        total += rising * (bernoulli / math.factorial(2 * k))
        rising *= (exponent + 2 * k - 1) * (exponent + 2 * k) / (place * place)
    total = jnp.where(undefined, jnp.nan, jnp.where(pole, jnp.inf, total))
    return jnp.where(exponent == 1, jnp.inf, total)


_BERNOULLI = (1 / 6, -1 / 30, 1 / 42, -1 / 30, 5 / 66, -691 / 2730, 7 / 6)  # B_2, B_4, ...


@lowering("polygamma", promote="result")
def polygamma(n, self, *, out):
    if n == 0:
        return digamma(self)
    if n > 1:
        sign = 1.0 if n % 2 else -1.0
        return sign * math.factorial(n) * stored(zeta(jnp.asarray(n + 1, self.dtype), self), out[0].dtype)
    # Reflected to the right half, where one sum serves all.
    reflected = jnp.where(self < 0.5, 1 - self, self)
    sine = jnp.sin(math.pi * self)  # not reduced first: near a pole that would be right where PyTorch is not
    trigamma = zeta(jnp.asarray(2, self.dtype), reflected)
    return jnp.where(self < 0.5, jnp.square(math.pi / sine) - trigamma, trigamma)


@lowering("mvlgamma", promote="result")
def mvlgamma(self, p):
    shifts = jnp.arange(p, dtype=self.dtype) / 2
    return p * (p - 1) / 4 * math.log(math.pi) + lax.lgamma(self[..., None] - shifts).sum(-1)
