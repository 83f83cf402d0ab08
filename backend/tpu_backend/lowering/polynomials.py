"""Orthogonal polynomials: Chebyshev of four kinds and shifted, Hermite, Laguerre, Legendre.

The degree is a tensor like any other, rounded towards zero: a negative one gives 0. All of them run their
three-term recurrence once, up to the highest degree present.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tpu_backend.lowering.registry import lowering

Polynomial = Callable[[jax.Array, jax.Array], jax.Array]  # of x and degree
Step = Callable[[Any, jax.Array, jax.Array], jax.Array]


def _recurrence(x: jax.Array, degree: jax.Array, first: jax.Array, step: Step) -> jax.Array:
    """P of every element's degree, from P_0 = 1, P_1 = first and P_{k+1} = step(k, P_{k-1}, P_k)."""

    def advance(state):
        k, before, value = state
        return k + 1, value, jnp.where(k < degree, step(k, before, value), value)

    start = jnp.ones((), x.dtype), jnp.ones_like(first), first
    highest = jnp.max(degree, initial=0)
    value = lax.while_loop(lambda state: state[0] < highest, advance, start)[2]
    return jnp.where(degree < 0, 0, jnp.where(degree == 0, 1, value))


def _register(name: str, polynomial: Polynomial) -> None:
    def lowered(x, n):
        x, degree = jnp.broadcast_arrays(x, jnp.trunc(n))
        return polynomial(x, degree)

    lowering(name, f"{name}.x_scalar", f"{name}.n_scalar", promote="result")(lowered)


# ---- Chebyshev; inside (-1, 1) high degrees are trigonometric functions of acos(x), as in PyTorch

_CLOSED_FORM_FROM = 7


def _chebyshev(first: Callable, closed_form: Callable) -> Polynomial:
    def polynomial(x, degree):
        closed = (degree >= _CLOSED_FORM_FROM) & (jnp.abs(x) < 1)
        angle = jnp.arccos(jnp.where(closed, x, 0))
        recurred = _recurrence(
            x, jnp.where(closed, 0, degree), first(x), lambda k, before, value: 2 * x * value - before
        )
        return jnp.where(closed, closed_form(degree, angle), recurred)

    return polynomial


def _shifted(polynomial: Polynomial) -> Polynomial:
    """From [-1, 1] to [0, 1]."""
    return lambda x, degree: polynomial(2 * x - 1, degree)


_KINDS = {
    "t": (lambda x: x, lambda n, angle: jnp.cos(n * angle)),
    "u": (lambda x: 2 * x, lambda n, angle: jnp.sin((n + 1) * angle) / jnp.sin(angle)),
    "v": (lambda x: 2 * x - 1, lambda n, angle: jnp.cos((n + 0.5) * angle) / jnp.cos(angle / 2)),
    "w": (lambda x: 2 * x + 1, lambda n, angle: jnp.sin((n + 0.5) * angle) / jnp.sin(angle / 2)),
}
for _kind, _parts in _KINDS.items():
    _register(f"special_chebyshev_polynomial_{_kind}", _chebyshev(*_parts))
    _register(f"special_shifted_chebyshev_polynomial_{_kind}", _shifted(_chebyshev(*_parts)))

# ---- the others


def _fused(x, y, term):
    """x * y + term, rounded once, as in PyTorch's kernels: high degrees multiply what a product loses."""
    return (x.astype(jnp.float64) * y + term).astype(x.dtype)


_HERMITE_LIMIT = {"float32": 128, "float64": 512}  # PyTorch: NaN above


def _hermite(scale: int) -> Polynomial:
    """Physicists' for scale 2, probabilists' for scale 1."""

    def polynomial(x, degree):
        limit = _HERMITE_LIMIT[x.dtype.name]
        value = _recurrence(
            x,
            jnp.minimum(degree, limit),
            scale * x,
            lambda k, before, value: scale * _fused(x, value, -k * before),
        )
        return jnp.where(degree > limit, jnp.nan, value)

    return polynomial


def _laguerre(x, degree):
    return _recurrence(
        x, degree, 1 - x, lambda k, before, value: ((2 * k + (1 - x)) * value - k * before) / (k + 1)
    )


def _legendre(x, degree):
    return _recurrence(
        x, degree, x, lambda k, before, value: ((2 * k + 1) * x * value - k * before) / (k + 1)
    )


_register("special_hermite_polynomial_h", _hermite(2))
_register("special_hermite_polynomial_he", _hermite(1))
_register("special_laguerre_polynomial_l", _laguerre)
_register("special_legendre_polynomial_p", _legendre)
