"""Attention by whole rows of scores: those of all queries at once, or of a block of queries after another.

It serves every mask, bias and dtype on every platform. Sizes are those of `attention.py`. Operands are in
float32, or wider; their values came from tensors of `dtype`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from tpu_backend.attention import block_of_scores
from tpu_backend.lowering.documents import documents_of
from tpu_backend.lowering.matmul import batched_matmul, product_precision
from tpu_backend.lowering.normalization import safe_softmax
from tpu_backend.lowering.platforms import lowered_for
from tpu_backend.lowering.random import coin
from tpu_backend.lowering.registry import is_16_bit


def forward(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None,
    is_causal: bool,
    factor: jax.Array,
    dtype: Any,
    dropout: Dropout | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Results (B, H, L, E) and log sums (B, H, L), -inf where a query looks nowhere."""

    def of_sequence(i: jax.Array, bias: jax.Array | None, *tensors: jax.Array) -> tuple[jax.Array, ...]:
        query, key, value = tensors
        return forward(query, key, value, bias, is_causal, factor, dtype, _dropout_of(dropout, i))

    if _goes_by_sequence(query, key):
        output, log_sums = _each_sequence(of_sequence, bias, query, key, value)
        return output, log_sums
    mask = _mask(bias, is_causal, query.shape[2], key.shape[2], dropout)

    def of_rows(mask: _Mask, query: jax.Array) -> _Found:
        scores = _scores(query, key, mask, factor, dtype)
        weights = safe_softmax(scores, -1)
        if dropout is not None:
            weights *= _dropout_factors(mask, dropout, weights)
        return _Found([_product(weights, value, dtype), jax.nn.logsumexp(scores, -1)], [])

    output, log_sums = _in_blocks(of_rows, key, mask, (query, 0)).of_queries
    return output, log_sums


def backward(
    grad_out: jax.Array,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None,
    output: jax.Array,
    log_sums: jax.Array,
    is_causal: bool,
    factor: jax.Array,
    dtype: Any,
    has_grad_bias: bool = False,
    dropout: Dropout | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """Gradients of query, key, value and, if it is asked for, of the bias. `output` and `log_sums` may be of
    more keys than these. Algorithm 2 of FlashAttention-2 (Dao 2023), on whole rows.
    """

    def of_sequence(i: jax.Array, bias: jax.Array | None, *tensors: jax.Array) -> tuple[jax.Array, ...]:
        grad_out, query, key, value, output, log_sums = tensors
        options = is_causal, factor, dtype, False, _dropout_of(dropout, i)
        return backward(grad_out, query, key, value, bias, output, log_sums, *options)[:3]

    if _goes_by_sequence(query, key) and not has_grad_bias:
        tensors = grad_out, query, key, value, output, log_sums
        grad_query, grad_key, grad_value = _each_sequence(of_sequence, bias, *tensors)
        return grad_query, grad_key, grad_value, None
    mask = _mask(bias, is_causal, query.shape[2], key.shape[2], dropout)

    def of_rows(
        mask: _Mask, grad_out: jax.Array, query: jax.Array, output: jax.Array, log_sums: jax.Array
    ) -> _Found:
        scores = _scores(query, key, mask, factor, dtype)
        looks_nowhere = (log_sums == -jnp.inf)[..., None]
        shift = jnp.where(looks_nowhere, 0, log_sums[..., None])
        weights = jnp.where(looks_nowhere, 0, jnp.exp(scores - shift))
        grad_weights = _product(grad_out, _transposed(value), dtype)
        mixed = weights  # what the values were multiplied by
        if dropout is not None:
            factors = _dropout_factors(mask, dropout, weights)
            mixed, grad_weights = weights * factors, grad_weights * factors
        expected = jnp.sum(grad_out * output, -1, keepdims=True)
        if is_16_bit(dtype) and lowered_for() != "tpu":  # there each further sum is a pass over all scores
            # So is `output`. Where these are all keys (to less than that rounding) the weights know better.
            total = jnp.sum(weights, -1, keepdims=True)
            mean = jnp.sum(weights * grad_weights, -1, keepdims=True) / total
            expected = jnp.where(total > 1 - 2**-12, mean, expected)
        grad_scores = weights * (grad_weights - expected)
        of_queries = [_product(grad_scores, key, dtype) * factor]
        of_keys = [
            _sum_of_products(grad_scores, query, key.shape[1], dtype) * factor,
            _sum_of_products(mixed, grad_out, value.shape[1], dtype),
        ]
        if mask.bias is not None and has_grad_bias:
            of_bias = _summed_to(grad_scores, mask.bias.shape)
            (of_queries if mask.bias.shape[2] > 1 else of_keys).append(of_bias)
        return _Found(of_queries, of_keys)

    # Weights of what is filled up are exp(score - inf), which is 0.
    given = (grad_out, 0), (query, 0), (output, 0), (log_sums, jnp.inf)
    (grad_query, *of_bias), (grad_key, grad_value, *summed) = _in_blocks(of_rows, key, mask, *given)
    grad_bias = None
    if bias is not None and has_grad_bias:
        grad_bias = (of_bias + summed)[0].reshape(bias.shape)
    return grad_query, grad_key, grad_value, grad_bias


class Dropout(NamedTuple):
    """Which of the softmax's weights are 0, and how much the others make up for them."""

    probability: float
    key: jax.Array
    """Of random numbers, which decide what is dropped: the same in the backward pass."""


class _Mask(NamedTuple):
    """Where some queries look. What is None limits nothing."""

    bias: jax.Array | None
    """Four dims, each whole or 1: True where a query looks, or what is added to its scores."""
    documents: tuple[jax.Array, jax.Array] | None
    """Of queries and of keys, (B or 1, L) and (B or 1, S): a query looks at its own."""
    place: jax.Array | None
    """Of the first of these queries among the keys: a query sees no later key."""
    window: int | None
    """How many keys such a query sees, its own place included."""
    random: jax.Array | None
    """The key of their dropout."""


def _mask(bias: jax.Array | None, is_causal: bool, queries: int, keys: int, dropout: Dropout | None) -> _Mask:
    said = documents_of(bias, queries, keys)
    place = None if said is None else said.place
    if said is not None or bias is None:
        of_pairs = None
    else:
        of_pairs = bias.reshape((1,) * (4 - bias.ndim) + bias.shape)
    return _Mask(
        of_pairs,
        None if said is None else (said.queries, said.keys),
        (jnp.int32(0) if place is None else place.astype(jnp.int32)) if is_causal else None,
        said.window if said is not None and is_causal else None,
        None if dropout is None else dropout.key,
    )


def _dropout_factors(mask: _Mask, dropout: Dropout, weights: jax.Array) -> jax.Array:
    """What the weights of some queries are multiplied with: 0, or 1 / (1 - p)."""
    kept = 1 - dropout.probability
    drawn = coin(mask.random, jnp.float32(kept), weights.shape)
    return drawn.astype(weights.dtype) / (kept or 1)


def _dropout_of(dropout: Dropout | None, i: jax.Array) -> Dropout | None:
    """That of one sequence."""
    return None if dropout is None else dropout._replace(key=jax.random.fold_in(dropout.key, i))


def _goes_by_sequence(query: jax.Array, key: jax.Array) -> bool:
    batch, heads, queries, _ = query.shape
    return block_of_scores(batch, heads, queries, key.shape[2])[0] < batch


def _each_sequence(
    function: Callable[..., tuple[jax.Array, ...]], bias: jax.Array | None, *tensors: jax.Array
) -> tuple[jax.Array, ...]:
    """The results of a function of the number, the bias and the tensors of one sequence after another."""
    is_shared = bias is None or bias.ndim < 4 or bias.shape[0] == 1

    def of(i: jax.Array) -> tuple[jax.Array, ...]:
        own = None if bias is None else bias if is_shared else _slice(bias, i, 1, 0)
        return function(i, own, *(_slice(each, i, 1, 0) for each in tensors))

    def add(i: jax.Array, found: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        parts = of(i)
        return tuple(lax.dynamic_update_slice_in_dim(a, b, i, 0) for a, b in zip(found, parts, strict=True))

    batch = tensors[0].shape[0]
    like = jax.eval_shape(of, jnp.int32(0))
    nothing = tuple(jnp.zeros((batch, *each.shape[1:]), each.dtype) for each in like)
    return lax.fori_loop(jnp.int32(0), jnp.int32(batch), add, nothing)


class _Found(NamedTuple):
    """Results for a block of queries."""

    of_queries: list[jax.Array]
    """A row for each of them, (B, H, L, ...)."""
    of_keys: list[jax.Array]
    """What they add to sums over all queries."""


def _in_blocks(
    of_rows: Callable[..., _Found], key: jax.Array, mask: _Mask, *given: tuple[jax.Array, float]
) -> _Found:
    """What `of_rows` finds by a mask and tensors (B, H, L, ...), for a block of queries at a time.

    Each tensor is given with the number that a last block is filled up with.
    """
    batch, heads, queries = given[0][0].shape[:3]
    _, rows = block_of_scores(batch, heads, queries, key.shape[2])
    if rows >= queries:
        return of_rows(mask, *(tensor for tensor, _ in given))
    count = math.ceil(queries / rows)
    tensors = [_filled_up(tensor, 2, rows, fill) for tensor, fill in given]
    if mask.bias is not None:
        mask = mask._replace(bias=_filled_up(mask.bias, 2, rows))
    if mask.documents is not None:
        mask = mask._replace(documents=(_filled_up(mask.documents[0], 1, rows), mask.documents[1]))

    def of_block(i: jax.Array) -> _Found:
        first = i * rows
        return of_rows(_part(mask, first, rows), *(_slice(each, first, rows, 2) for each in tensors))

    def add(i: jax.Array, found: _Found) -> _Found:
        block = of_block(i)
        return _Found(
            [
                lax.dynamic_update_slice_in_dim(whole, part, i * rows, 2)
                for whole, part in zip(found.of_queries, block.of_queries, strict=True)
            ],
            [total + each for total, each in zip(found.of_keys, block.of_keys, strict=True)],
        )

    like = jax.eval_shape(of_block, jnp.int32(0))
    nothing = _Found(
        [jnp.zeros((*each.shape[:2], count * rows, *each.shape[3:]), each.dtype) for each in like.of_queries],
        [jnp.zeros(each.shape, each.dtype) for each in like.of_keys],
    )
    # Of 32 bits: otherwise a TPU's compiler does not know the number of turns.
    found = lax.fori_loop(jnp.int32(0), jnp.int32(count), add, nothing)
    return _Found([each[:, :, :queries] for each in found.of_queries], found.of_keys)


def _filled_up(tensor: jax.Array, dim: int, rows: int, fill: float = 0) -> jax.Array:
    """To a multiple of `rows` in a dim, unless it is of size 1."""
    if tensor.shape[dim] == 1 or tensor.shape[dim] % rows == 0:
        return tensor
    padding = [(0, 0)] * tensor.ndim
    padding[dim] = (0, -tensor.shape[dim] % rows)
    return jnp.pad(tensor, padding, constant_values=fill)


def _slice(tensor: jax.Array, first: jax.Array, rows: int, dim: int) -> jax.Array:
    return lax.dynamic_slice_in_dim(tensor, first, rows, dim)


def _part(mask: _Mask, first: jax.Array, rows: int) -> _Mask:
    """The mask of some of its queries."""
    bias, documents, place, window, random = mask
    if bias is not None and bias.shape[2] > 1:
        bias = _slice(bias, first, rows, 2)
    if documents is not None:
        documents = _slice(documents[0], first, rows, 1), documents[1]
    return _Mask(
        bias,
        documents,
        None if place is None else place + first,
        window,
        None if random is None else jax.random.fold_in(random, first),
    )


def _scores(query: jax.Array, key: jax.Array, mask: _Mask, factor: jax.Array, dtype: Any) -> jax.Array:
    """(B, H, L, S), -inf where a query does not look."""
    # Rounded, since the compiler keeps them for the backward pass.
    scores = _product(query, _transposed(key), dtype, is_rounded=True) * factor
    if mask.place is not None:
        rows, columns = (jnp.arange(each.shape[2], dtype=jnp.int32) for each in (query, key))
        distances = rows[:, None] + mask.place - columns
        is_seen = distances >= 0
        if mask.window is not None:
            is_seen &= distances < mask.window
        scores = jnp.where(is_seen, scores, -jnp.inf)
    if mask.documents is not None:
        of_queries, of_keys = mask.documents
        scores = jnp.where((of_queries[:, :, None] == of_keys[:, None, :])[:, None], scores, -jnp.inf)
    if mask.bias is None:
        return scores
    if jnp.issubdtype(mask.bias.dtype, jnp.floating):
        return scores + mask.bias
    return jnp.where(mask.bias, scores, -jnp.inf)


def _transposed(tensor: jax.Array) -> jax.Array:
    return jnp.swapaxes(tensor, -1, -2)


def _grouped(tensor: jax.Array, num_heads: int) -> jax.Array:
    """(B, H, L, E) as (B, num_heads, L * H / num_heads, E): what meets one head of keys is one matrix."""
    batch, heads, length, features = tensor.shape
    return tensor.reshape(batch, num_heads, length * heads // num_heads, features)


def _with_groups(tensor: jax.Array, num_heads: int) -> jax.Array:
    """(B, H, L, E) as (B, num_heads, H / num_heads, L, E)."""
    batch, heads, *sizes = tensor.shape
    return tensor.reshape(batch, num_heads, heads // num_heads, *sizes)


def _product(left: jax.Array, right: jax.Array, dtype: Any, is_rounded: bool = False) -> jax.Array:
    """Of each query head (B, H, M, C) with what its group shares (B, K, C, N): (B, H, M, N).

    `is_rounded`: on a TPU the product is in memory in `dtype`, if that is bfloat16.
    """
    heads = right.shape[1]
    if lowered_for() == "tpu":
        product = _einsum("bkgmc,bkcn->bkgmn", _with_groups(left, heads), right, dtype, is_rounded)
    else:
        product = batched_matmul(_grouped(left, heads), right)
    return product.reshape(*left.shape[:3], right.shape[3])


def _sum_of_products(left: jax.Array, right: jax.Array, num_heads: int, dtype: Any) -> jax.Array:
    """Of the transposes of (B, H, M, C) with (B, H, M, N), summed over each group: (B, num_heads, C, N)."""
    if lowered_for() == "tpu":
        return _einsum(
            "bkgmc,bkgmn->bkcn", _with_groups(left, num_heads), _with_groups(right, num_heads), dtype
        )
    return batched_matmul(_transposed(_grouped(left, num_heads)), _grouped(right, num_heads))


def _einsum(dims: str, left: jax.Array, right: jax.Array, dtype: Any, is_rounded: bool = False) -> jax.Array:
    """On a TPU groups are a dimension of their own: heads are beside each other in memory, so that joining
    groups with queries would be a copy. Its matrix unit takes six passes for float32 operands and one for
    16-bit ones: so there they go back.
    """
    wide = left.dtype
    if is_16_bit(dtype):
        left, right = left.astype(dtype), right.astype(dtype)
    product = jnp.einsum(
        dims,
        left,
        right,
        precision=product_precision(left.dtype),
        # float16 could not hold all scores.
        preferred_element_type=left.dtype if is_rounded and left.dtype == jnp.bfloat16 else wide,
    )
    return product.astype(wide)


def _summed_to(gradient: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The gradient of what was broadcast from this shape."""
    return jnp.sum(gradient, [dim for dim, size in enumerate(shape) if size == 1], keepdims=True)
