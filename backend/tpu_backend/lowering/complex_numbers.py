"""Functions of complex numbers at branch cuts and infinities, as in C: XLA's lose the sign of a zero there,
or have NaN.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax


def _is_infinite(self: jax.Array) -> jax.Array:
    return jnp.isinf(self.real) | jnp.isinf(self.imag)


def _like(number: jax.Array, sign: jax.Array) -> jax.Array:
    return jnp.where(jnp.isnan(number) | jnp.isnan(sign), number, jnp.copysign(number, sign))


def _angle(angle: jax.Array, part: jax.Array, other: jax.Array) -> jax.Array:
    """XLA has a quarter of a circle where a part is NaN."""
    is_unknown = jnp.isnan(part) | (jnp.isnan(other) & jnp.isfinite(part))
    return jnp.where(is_unknown, jnp.nan, jnp.copysign(angle, part))


def sqrt(self):
    root, is_tall = lax.sqrt(self), jnp.isinf(self.imag)
    real = jnp.where(is_tall | (self.real == jnp.inf), jnp.inf, root.real)
    return lax.complex(real, jnp.where(is_tall, self.imag, _like(root.imag, self.imag)))


def asin(self):
    result = jnp.arcsin(self)
    return lax.complex(result.real, _like(result.imag, self.imag))


def acos(self):
    result = jnp.arccos(self)
    return lax.complex(result.real, _like(result.imag, -self.imag))


def atan(self):
    result = jnp.arctan(self)
    imag = jnp.where(self.imag == 0, self.imag, _like(result.imag, self.imag))
    return lax.complex(_angle(result.real, self.real, self.imag), imag)


def asinh(self):
    result = jnp.arcsinh(self)
    return lax.complex(_like(result.real, self.real), _like(result.imag, self.imag))


def acosh(self):
    result = jnp.arccosh(self)
    return lax.complex(result.real, _like(result.imag, self.imag))


def atanh(self):
    result = jnp.arctanh(self)
    real = jnp.where(self.real == 0, self.real, _like(result.real, self.real))
    return lax.complex(real, _angle(result.imag, self.imag, self.real))


def abs(self):
    return jnp.where(_is_infinite(self), jnp.inf, jnp.abs(self))


def exp(self):
    """An infinite or undefined angle does not matter at length 0, and leaves the length infinite."""
    has_angle = jnp.isfinite(self.imag)
    result = jnp.exp(self)
    result = jnp.where(~has_angle & (self.real == -jnp.inf), 0, result)
    # A number of Python's would be complex128 first, at which a TPU's compiler aborts.
    infinite = lax.complex(*(jnp.asarray(each, self.real.dtype) for each in (math.inf, math.nan)))
    return jnp.where(~has_angle & (self.real == jnp.inf), infinite, result)


def exp2(self):
    return exp(lax.complex(self.real * math.log(2), self.imag * math.log(2)))


def sigmoid(self):
    return 1 / (1 + exp(-self))


def log(self, base=math.e):
    result = jnp.log(self)
    real = jnp.where(_is_infinite(self), jnp.inf, result.real)
    return lax.complex(real / math.log(base), result.imag / math.log(base))


def power(self, exponent):
    """Zero to a power with a positive real part is zero."""
    is_zero = (self == 0) & (exponent.real > 0)
    return jnp.where(is_zero, 0, jnp.power(jnp.where(is_zero, 1, self), exponent))
