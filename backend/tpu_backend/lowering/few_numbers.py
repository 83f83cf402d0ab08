"""Arithmetic on a few numbers, on a CPU in the order and with the roundings of PyTorch's CPU kernels.

An algorithm that compares sums goes another way for another last digit: LBFGS's line search, after three
steps on 27 numbers, ends 10^5 tolerances away on PyTorch's own CPU without vector instructions
(``ATEN_CPU_CAPABILITY=default``). Here it goes the CPU's way. Arrays of more than a few numbers are XLA's.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, reduce
from operator import add

import jax
import jax.numpy as jnp
from jax import lax

from tpu_backend.lowering import rounding

_DTYPES = (jnp.float32, jnp.float64)
_VECTOR_BYTES = 32
_LANES = 8  # float32 numbers in a vector
_MOST_ADDED = 128  # in one sum: what stays a few lines of program
_MOST_MULTIPLIED = 4 * _LANES - 1  # in a scalar product; from there on it has another order
_NUMBERS_OF_TWO_VECTORS = 32  # of 16 bit
_MOST_SCALED = 2**14  # where the way over float64 costs no time that anybody would notice


class _Order(threading.local):
    is_ordinary = False


_order = _Order()


@contextmanager
def in_ordinary_order() -> Iterator[None]:
    """In here few numbers are computed as many are, so that lowerings of all sizes are alike."""
    outer, _order.is_ordinary = _order.is_ordinary, True
    try:
        yield
    finally:
        _order.is_ordinary = outer


def are_few(count: int, most: int) -> bool:
    """Whether so many numbers are a few."""
    return 0 < count <= most and not _order.is_ordinary


def sum_of(values: jax.Array, dims: Sequence[int]) -> jax.Array:
    """The sum over ``dims``, without them."""
    ordinary = partial(jnp.sum, axis=tuple(dims), dtype=values.dtype)
    kept = values.shape[: values.ndim - len(dims)]
    count = math.prod(values.shape[len(kept) :])
    are_last = sorted(dims) == list(range(len(kept), values.ndim))
    if values.dtype not in _DTYPES or not are_last or not are_few(count, _MOST_ADDED):
        return ordinary(values)
    return lax.platform_dependent(
        values, cpu=lambda values: _sum_in_lanes(values.reshape(*kept, count)), default=ordinary
    )


def scalar_product(left: jax.Array, right: jax.Array, ordinary: Callable[..., jax.Array]) -> jax.Array:
    """``left @ right`` of two vectors; ``ordinary`` computes it for other sizes, dtypes and platforms."""
    if left.dtype != jnp.float32 or not are_few(left.size, _MOST_MULTIPLIED):
        return ordinary(left, right)
    return lax.platform_dependent(left, right, cpu=_product_in_lanes, default=ordinary)


def add_scaled(values: jax.Array, factor: jax.Array, others: jax.Array) -> jax.Array:
    """``values + factor * others``, on a CPU with one rounding."""
    if not are_few(max(1, values.size, others.size), _MOST_SCALED):
        return values + factor * others
    return rounding.fused(factor, others, values)


def add_scaled_16_bit(
    values: jax.Array, factor: jax.Array, others: jax.Array, stored: Callable[[jax.Array], jax.Array]
) -> jax.Array:
    """The same of 16-bit numbers, computed in float32. The CPU's vectors round once; of what does not fill
    two of them the product is rounded as well, by ``stored``: of tensors of a few numbers that is all.
    """
    product = factor * others
    return _with_left_over(values + product, lambda: values + stored(product))


def rsqrt_16_bit(values: jax.Array, stored: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """``1 / sqrt(values)`` of 16-bit numbers, in float32; the root of what is left over is rounded."""
    return _with_left_over(lax.rsqrt(values), lambda: 1 / stored(jnp.sqrt(values)))


def _with_left_over(vectors: jax.Array, others: Callable[[], jax.Array]) -> jax.Array:
    """On a CPU ``others`` for 16-bit numbers at the end of a contiguous array that fill no two vectors."""
    left_over = vectors.size % _NUMBERS_OF_TWO_VECTORS
    if left_over == 0 or not are_few(vectors.size, _MOST_SCALED):
        return vectors
    is_left_over = jnp.arange(vectors.size).reshape(vectors.shape) >= vectors.size - left_over
    return lax.platform_dependent(
        vectors,
        others(),
        cpu=lambda vectors, others: jnp.where(is_left_over, others, vectors),
        default=lambda vectors, _: vectors,
    )


def _sum_in_lanes(rows: jax.Array) -> jax.Array:
    """Each row's sum: four vectors take turns at adding, what is left of the row comes before their lanes."""
    count, width = rows.shape[-1], _VECTOR_BYTES // rows.dtype.itemsize
    if count < width:
        return _in_turns([rows[..., i] for i in range(count)])
    whole = count // width * width
    lanes = _in_turns([rows[..., i : i + width] for i in range(0, whole, width)])
    rest = [rows[..., i] for i in range(whole, count)]
    return reduce(add, [*rest, *(lanes[..., i] for i in range(width))])


def _in_turns(terms: list[jax.Array]) -> jax.Array:
    """Their sum by four accumulators; those that make no full turn all go to the first."""
    turns = len(terms) // 4 * 4
    first, *others = (terms[start:turns:4] for start in range(4))
    return reduce(
        add, [reduce(add, accumulated) for accumulated in (first + terms[turns:], *others) if accumulated]
    )


def _product_in_lanes(left: jax.Array, right: jax.Array) -> jax.Array:
    """Two vectors accumulate, the second time with one rounding; then halves meet, then neighbours."""
    missing = 4 * _LANES - left.size
    left, right = (jnp.pad(values, (0, missing)).reshape(2, 2, _LANES) for values in (left, right))
    both = rounding.fused(left[1], right[1], left[0] * right[0])
    halves = (both[0] + both[1]).reshape(2, _LANES // 2)
    neighbours = (halves[0] + halves[1]).reshape(2, 2)
    pairs = neighbours[:, 0] + neighbours[:, 1]
    return pairs[0] + pairs[1]
