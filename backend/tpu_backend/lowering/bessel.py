"""Bessel and Airy functions, and the scaled complementary error function.

Each is a smooth function times what makes it grow or oscillate; the smooth part is a Chebyshev series whose
coefficients are interpolated from SciPy's float64 functions when a program is first lowered. For large
arguments the smooth parts are the amplitudes P and Q of Hankel's expansion (DLMF 10.17), for Airy's function
those of DLMF 9.7, which are even and odd in 1 / x.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import scipy  # loads scipy.special, a tenth of a second, where a coefficient asks for it
from jax.scipy.special import i0, i1
from numpy.polynomial import chebyshev

from tpu_backend.lowering.registry import lowering

_MAX_TERMS = 40


@dataclass(frozen=True)
class _Smooth:
    """A smooth real function on [low, high], evaluated in the argument's own precision."""

    function: Callable[[np.ndarray], np.ndarray]
    low: float = 0.0
    high: float = 1.0

    def __call__(self, x: jax.Array) -> jax.Array:
        series = _coefficients(self)
        series = series[: 1 + max(np.flatnonzero(np.abs(series) > jnp.finfo(x.dtype).eps / 8))]
        position = (2 * x - (self.low + self.high)) / (self.high - self.low)
        ahead = behind = jnp.zeros_like(x)
        for coefficient in series[:0:-1]:  # Clenshaw's recurrence
            ahead, behind = 2 * position * ahead - behind + float(coefficient), ahead
        return position * ahead - behind + float(series[0])


@cache
def _coefficients(smooth: _Smooth) -> np.ndarray:
    middle, half = (smooth.low + smooth.high) / 2, (smooth.high - smooth.low) / 2
    return chebyshev.chebinterpolate(lambda t: smooth.function(middle + half * t), _MAX_TERMS - 1)


# ---- Bessel functions J and Y of order 0 and 1

_LARGE = 8.0


def _hankel(order: int, z: np.ndarray) -> np.ndarray:
    """P + iQ at x = 8 / sqrt(z)."""
    x = _LARGE / np.sqrt(z)
    return (
        scipy.special.hankel1e(order, x)
        * np.sqrt(math.pi * x / 2)
        * np.exp(1j * math.pi * (order / 2 + 1 / 4))
    )


def _amplitudes(order: int) -> tuple[_Smooth, _Smooth]:
    """P and Q / sqrt(z) of ``_hankel``, both smooth down to z = 0."""
    return (
        _Smooth(lambda z: _hankel(order, z).real),
        _Smooth(lambda z: _hankel(order, z).imag / np.sqrt(z)),
    )


_AMPLITUDES = [_amplitudes(order) for order in (0, 1)]
_J_NEAR = [
    _Smooth(lambda u: scipy.special.j0(np.sqrt(u)), 0, _LARGE**2),
    _Smooth(lambda u: scipy.special.j1(np.sqrt(u)) / np.sqrt(u), 0, _LARGE**2),
]
_Y_NEAR = [  # without the logarithm and the pole
    _Smooth(
        lambda u: scipy.special.y0(np.sqrt(u)) - np.log(u) / math.pi * scipy.special.j0(np.sqrt(u)),
        0,
        _LARGE**2,
    ),
    _Smooth(
        lambda u: (
            (scipy.special.y1(np.sqrt(u)) - np.log(u) / math.pi * scipy.special.j1(np.sqrt(u))) / np.sqrt(u)
            + 2 / (math.pi * u)
        ),
        0,
        _LARGE**2,
    ),
]


def _far(order: int, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """J and Y where x > 8."""
    x = jnp.maximum(x, _LARGE)
    ratio = _LARGE / x
    p, q = (amplitude(ratio * ratio) for amplitude in _AMPLITUDES[order])
    q = ratio * q
    phase, size = x - math.pi * (order / 2 + 1 / 4), jnp.sqrt(2 / (math.pi * x))
    cos, sin = jnp.cos(phase), jnp.sin(phase)
    return size * (p * cos - q * sin), size * (p * sin + q * cos)


def _j_near(order: int, x: jax.Array) -> jax.Array:
    near = jnp.minimum(x, _LARGE)
    value = _J_NEAR[order](near * near)
    return near * value if order else value


def _j(order: int, x: jax.Array) -> jax.Array:
    return jnp.where(x > _LARGE, _far(order, x)[0], _j_near(order, x))


def _y(order: int, x: jax.Array) -> jax.Array:
    """Minus infinity at 0, NaN to the left of it."""
    near = jnp.minimum(x, _LARGE)
    value = _Y_NEAR[order](near * near)
    if order:
        value = near * value - 2 / (math.pi * near)
    value += 2 / math.pi * jnp.log(near) * _j_near(order, near)
    value = jnp.where(x == 0, -jnp.inf, value)
    return jnp.where(x > _LARGE, _far(order, x)[1], value)


lowering("special_bessel_j0", promote="result")(lambda self: _j(0, jnp.abs(self)))
lowering("special_bessel_j1", promote="result")(lambda self: jnp.sign(self) * _j(1, jnp.abs(self)))
lowering("special_bessel_y0", promote="result")(lambda self: _y(0, self))
lowering("special_bessel_y1", promote="result")(lambda self: _y(1, self))


@lowering("special_spherical_bessel_j0", promote="result")
def spherical_bessel_j0(x):
    safe = jnp.where(x == 0, 1, x)
    return jnp.where(x == 0, 1, jnp.where(jnp.isinf(x), 0, jnp.sin(safe) / safe))


# ---- modified Bessel functions K

_K_LARGE = 2.0
_K_NEAR = [  # without the logarithm; the second times x
    _Smooth(
        lambda u: scipy.special.k0(np.sqrt(u)) + np.log(u / 4) / 2 * scipy.special.i0(np.sqrt(u)),
        0,
        _K_LARGE**2,
    ),
    _Smooth(
        lambda u: (
            (scipy.special.k1(np.sqrt(u)) - np.log(u / 4) / 2 * scipy.special.i1(np.sqrt(u))) * np.sqrt(u)
        ),
        0,
        _K_LARGE**2,
    ),
]
_K_FAR = [
    _Smooth(lambda z: scipy.special.k0e(_K_LARGE / z) * np.sqrt(_K_LARGE / z)),
    _Smooth(lambda z: scipy.special.k1e(_K_LARGE / z) * np.sqrt(_K_LARGE / z)),
]


def _k(order: int, x: jax.Array, scaled: bool) -> jax.Array:
    """Infinity at 0, NaN to the left of it; times exp(x) where scaled."""
    near, far = jnp.minimum(x, _K_LARGE), jnp.maximum(x, _K_LARGE)
    value, logarithm = _K_NEAR[order](near * near), jnp.log(near / 2)
    value = value / near + logarithm * i1(near) if order else value - logarithm * i0(near)
    value = jnp.where(x == 0, jnp.inf, value)
    amplitude = _K_FAR[order](_K_LARGE / far) / jnp.sqrt(far)
    if scaled:
        return jnp.where(x > _K_LARGE, amplitude, value * jnp.exp(near))
    return jnp.where(x > _K_LARGE, amplitude * jnp.exp(-far), value)


lowering("special_modified_bessel_k0", promote="result")(lambda self: _k(0, self, False))
lowering("special_modified_bessel_k1", promote="result")(lambda self: _k(1, self, False))
lowering("special_scaled_modified_bessel_k0", promote="result")(lambda x: _k(0, x, True))
lowering("special_scaled_modified_bessel_k1", promote="result")(lambda x: _k(1, x, True))

# ---- Airy's function

_AIRY_LARGE = 2.0
_ZETA_LARGE = 2 / 3 * _AIRY_LARGE**1.5


def _airy_amplitudes(z: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """P and Q of Ai(-x) at the x whose zeta = 2/3 x^(3/2) has ratio^2 = z to that of 2."""
    zeta = _ZETA_LARGE / np.sqrt(z)
    x = (1.5 * zeta) ** (2 / 3)
    ai, _, bi, _ = scipy.special.airy(-x)
    phase, size = zeta - math.pi / 4, math.sqrt(math.pi) * x**0.25
    return size * (ai * np.cos(phase) - bi * np.sin(phase)), size * (ai * np.sin(phase) + bi * np.cos(phase))


def _airy_decay(z: np.ndarray) -> np.ndarray:
    x = (1.5 * _ZETA_LARGE / z) ** (2 / 3)
    return scipy.special.airye(x)[0] * 2 * math.sqrt(math.pi) * x**0.25


_AIRY_P = _Smooth(lambda z: _airy_amplitudes(z)[0])
_AIRY_Q = _Smooth(lambda z: _airy_amplitudes(z)[1] / np.sqrt(z))
_AIRY_DECAY = _Smooth(_airy_decay)
_AIRY_NEAR = _Smooth(lambda x: scipy.special.airy(x)[0], -_AIRY_LARGE, _AIRY_LARGE)


@lowering("special_airy_ai", promote="result")
def airy_ai(x):
    size = jnp.maximum(jnp.abs(x), _AIRY_LARGE)
    zeta, root = 2 / 3 * size * jnp.sqrt(size), math.sqrt(math.pi) * jnp.sqrt(jnp.sqrt(size))
    ratio = _ZETA_LARGE / zeta
    p, q, phase = _AIRY_P(ratio * ratio), ratio * _AIRY_Q(ratio * ratio), zeta - math.pi / 4
    left = (p * jnp.cos(phase) + q * jnp.sin(phase)) / root
    right = _AIRY_DECAY(ratio) * jnp.exp(-zeta) / (2 * root)
    near = _AIRY_NEAR(jnp.clip(x, -_AIRY_LARGE, _AIRY_LARGE))
    value = jnp.where(x < -_AIRY_LARGE, left, jnp.where(x > _AIRY_LARGE, right, near))
    return jnp.where(jnp.isfinite(x), value, jnp.nan)


# ---- exp(x^2) erfc(x)

_ERFCX_CENTRE = 3.75  # (x - c) / (x + c) maps [0, inf) to [-1, 1), after Shepherd and Laframboise (1981)


def _erfcx_smooth(t: np.ndarray) -> np.ndarray:
    x = _ERFCX_CENTRE * (1 + t) / (1 - t)
    return (1 + 2 * x) * scipy.special.erfcx(x)


_ERFCX = _Smooth(_erfcx_smooth, -1, 1)


@lowering("special_erfcx", promote="result")
def erfcx(self):
    size = jnp.abs(self)
    right = _ERFCX((1 - _ERFCX_CENTRE / size) / (1 + _ERFCX_CENTRE / size)) / (1 + 2 * size)
    right = jnp.where(size == 0, 1, right)
    # The square in two parts, the first of them exact: its rounding error would be exp's relative error.
    bits = jnp.finfo(self.dtype).nmant // 2
    scale = jnp.exp2(jnp.asarray(bits, self.dtype) - jnp.ceil(jnp.log2(jnp.maximum(size, 1))))
    head = jnp.round(self * scale) / scale
    square = jnp.exp(head * head) * jnp.exp((self - head) * (self + head))
    return jnp.where(self < 0, jnp.where(size > 30, jnp.inf, 2 * square) - right, right)
