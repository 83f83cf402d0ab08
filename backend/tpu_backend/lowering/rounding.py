"""Arithmetic rounded as in PyTorch's CPU kernels, for results that hang on the last bit of what went before.

XLA's exp and log are one bit off for every tenth number, the C library's almost never, and XLA contracts
x * y + z to a fused multiply-add or not as its flags say, not where PyTorch's compiler does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax


def _rounded_once(function: Callable[[Any], Any], x: Any) -> Any:
    """float32 by way of float64, on the CPU: elsewhere that is slow, and another compiler's bits anyway."""
    if x.dtype != jnp.float32:
        return function(x)

    def through_float64(x):
        return function(x.astype(jnp.float64)).astype(jnp.float32)

    return lax.platform_dependent(x, cpu=through_float64, default=function)


def exp(x: Any) -> Any:
    return _rounded_once(jnp.exp, x)


def log(x: Any) -> Any:
    return _rounded_once(jnp.log, x)


def fused(x: Any, factor: float, term: float) -> Any:
    """x * factor + term, rounded once."""
    return _rounded_once(lambda x: x * factor + term, x)


def product(x: Any, y: Any) -> Any:
    """x * y, rounded before anything is added to it: the maximum changes no finite number, and no compiler
    fuses through it.
    """
    result = x * y
    return jnp.maximum(result, jnp.finfo(result.dtype).min)
