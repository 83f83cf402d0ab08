"""Arithmetic rounded as in PyTorch's CPU kernels, for results that hang on the last bit of what went before.

XLA's exp and log are one bit off for every tenth number, the C library's almost never, and XLA contracts
x * y + z to a fused multiply-add or not as its flags say, not where PyTorch's compiler does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
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


def fused(x: Any, y: Any, z: Any) -> Any:
    """x * y + z, on a CPU rounded once; of a dtype other than float32 and float64 as XLA does it."""

    def ordinary(x: Any, y: Any, z: Any) -> Any:
        return x * y + z

    dtype = jnp.result_type(x, y, z)
    if dtype not in _FUSED_ON_CPU:
        return ordinary(x, y, z)
    numbers = (jnp.asarray(each, dtype) for each in (x, y, z))
    return lax.platform_dependent(*numbers, cpu=_FUSED_ON_CPU[dtype], default=ordinary)


def _fused_float32(*numbers: jax.Array) -> jax.Array:
    x, y, z = (number.astype(jnp.float64) for number in numbers)  # which holds the product of two float32
    return (x * y + z).astype(jnp.float32)


def _fused_float64(x: jax.Array, y: jax.Array, z: jax.Array) -> jax.Array:
    product, lost_in_product = _exact_product(x, y)
    total, lost_in_sum = _exact_sum(z, product)
    lost = lost_in_sum + lost_in_product
    return jnp.where(jnp.isfinite(lost), total + lost, total)


def _exact_product(left: jax.Array, right: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The rounded product, and what rounding took from it (Dekker 1971)."""
    product = left * right
    (high, low), (other_high, other_low) = _halves(left), _halves(right)
    return product, ((high * other_high - product) + high * other_low + low * other_high) + low * other_low


def _halves(values: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Two float64 numbers of 26 bits that add up to each (Veltkamp)."""
    moved = (2.0**27 + 1) * values
    high = moved - (moved - values)
    return high, values - high


def _exact_sum(left: jax.Array, right: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The rounded sum, and what rounding took from it (Knuth)."""
    total = left + right
    of_right = total - left
    return total, (left - (total - of_right)) + (right - of_right)


_FUSED_ON_CPU: dict[Any, Callable[..., jax.Array]] = {
    jnp.dtype("float32"): _fused_float32,
    jnp.dtype("float64"): _fused_float64,
}


def opaque(x: Any) -> Any:
    """x, which XLA's simplifier does not look behind; but for float64 on a TPU it costs nothing and fuses.

    The simplifier makes x of log(exp(x)) and |x| of sqrt(x * x), which overflow otherwise, and of
    log(pow(x, y)) it makes y * log(|x|), a number where PyTorch has NaN.
    """
    if not jnp.issubdtype(jnp.result_type(x), jnp.floating):
        return x
    bits = jnp.finfo(x.dtype)

    def as_precise(x: jax.Array) -> jax.Array:
        return lax.reduce_precision(x, bits.nexp, bits.nmant)

    if bits.bits < 64:
        return as_precise(x)
    # A TPU's compiler, which makes pairs of float32 of such numbers, does not know this operation for them.
    return lax.platform_dependent(x, tpu=lax.optimization_barrier, default=as_precise)


def product(x: Any, y: Any) -> Any:
    """x * y, rounded before anything is added to it: the maximum changes no finite number, and no compiler
    fuses through it.
    """
    result = x * y
    return jnp.maximum(result, jnp.finfo(result.dtype).min)
