"""Scaled dot-product attention: a softmax over all scores, and its gradients from the log of their sum.

Scores that fill more than one block are never in memory together: on a CPU `blocked_attention.py`, on a TPU
`splash_attention.py`.

Sizes: B batch, H heads, L queries, S keys, E features. Keys and values may have fewer heads than queries,
each for a group of query heads in a row. A mask says where to look, a bias is added to the scores; both
broadcast to (B, H, L, S). A mask of integers says of which documents queries and keys are: a query looks at
its own document (`documents.py`). 16-bit tensors are computed in float32; on a TPU their
products are of 16-bit operands, as in its flash kernels. (The registry gives parameters called `key` and
`out` a meaning of their own; here they are `keys` and `output`.)
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from tpu_backend.lowering import blocked_attention, splash_attention
from tpu_backend.lowering.documents import documents_of
from tpu_backend.lowering.matmul import batched_matmul, product_precision
from tpu_backend.lowering.normalization import safe_softmax
from tpu_backend.lowering.platforms import lowered_for
from tpu_backend.lowering.registry import is_16_bit, lowering, opmath


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

    Operands are in float32, or wider; their values came from tensors of `dtype`. `is_rounded`: on a TPU the
    product is in memory in `dtype`, if that has 16 bits.
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
        preferred_element_type=left.dtype if is_rounded else wide,
    )
    return product.astype(wide)


def _factor(query: jax.Array, scale: jax.Array | None) -> jax.Array:
    return jnp.asarray(1 / math.sqrt(query.shape[-1]) if scale is None else scale, query.dtype)


def _scores(
    query: jax.Array, key: jax.Array, bias: jax.Array | None, is_causal: bool, factor: jax.Array, dtype: Any
) -> jax.Array:
    """(B, H, L, S), -inf where a query does not look."""
    queries, keys = query.shape[2], key.shape[2]
    # Rounded, since the compiler keeps them for the backward pass.
    scores = _product(query, _transposed(key), dtype, is_rounded=True) * factor
    documents = documents_of(bias, queries, keys)
    if is_causal:
        if documents is None or documents.place is None:
            is_earlier = jnp.tril(jnp.ones((queries, keys), jnp.bool_))
        else:
            is_earlier = jnp.arange(queries)[:, None] + documents.place >= jnp.arange(keys)
        scores = jnp.where(is_earlier, scores, -jnp.inf)
    if bias is None:
        return scores
    if jnp.issubdtype(bias.dtype, jnp.floating):
        return scores + bias
    if documents is not None:
        bias = (documents.queries[:, :, None] == documents.keys[:, None, :])[:, None]
    return jnp.where(bias, scores, -jnp.inf)


def _attention_on_tpu(
    query, keys, values, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, *, scale=None
):  # fmt: skip
    if not splash_attention.fits(query, keys, values, attn_bias):
        return attention(
            query, keys, values, attn_bias, compute_log_sumexp, dropout_p, is_causal, scale=scale
        )
    factor = _factor(query.astype(jnp.float32), scale)
    output, log_sums = splash_attention.forward(
        query, keys, values, attn_bias, is_causal, factor, has_log_sums=compute_log_sumexp
    )
    return output, log_sums, None, None


@lowering("_scaled_dot_product_efficient_attention", runtime=("scale",), on={"tpu": _attention_on_tpu})
def attention(
    query, keys, values, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, *, scale=None
):  # fmt: skip
    """Results (B, H, L, E), log sums (B, H, L), which are -inf where a query looks nowhere, and a state of
    dropout that is none."""
    dtype = query.dtype
    query, keys, values = (each.astype(opmath(each.dtype)) for each in (query, keys, values))
    factor = _factor(query, scale)
    if blocked_attention.fits(query, keys, values, has_gradients=compute_log_sumexp):
        output, log_sums = blocked_attention.forward(query, keys, values, attn_bias, is_causal, factor)
    else:
        scores = _scores(query, keys, attn_bias, is_causal, factor, dtype)
        weights = safe_softmax(scores, -1)
        output = _product(weights, values, dtype)
        log_sums = jax.nn.logsumexp(scores, -1)
    return output, log_sums if compute_log_sumexp else jnp.zeros((*query.shape[:2], 0)), None, None


def _attention_backward_on_tpu(
    grad_out_, query, keys, values, attn_bias, output, logsumexp, philox_seed, philox_offset,
    dropout_p, grad_input_mask, is_causal=False, *, scale=None,
):  # fmt: skip
    if not splash_attention.fits(query, keys, values, attn_bias):
        return attention_backward(
            grad_out_, query, keys, values, attn_bias, output, logsumexp, philox_seed, philox_offset,
            dropout_p, grad_input_mask, is_causal, scale=scale,
        )  # fmt: skip
    factor = _factor(query.astype(jnp.float32), scale)
    found = splash_attention.backward(
        grad_out_, query, keys, values, attn_bias, output, logsumexp, is_causal, factor
    )
    return *(each if is_wanted else None for each, is_wanted in zip(found, grad_input_mask)), None


@lowering(
    "_scaled_dot_product_efficient_attention_backward",
    runtime=("scale",),
    on={"tpu": _attention_backward_on_tpu},
)
def attention_backward(
    grad_out_, query, keys, values, attn_bias, output, logsumexp, _philox_seed, _philox_offset,
    dropout_p, grad_input_mask, is_causal=False, *, scale=None,
):  # fmt: skip
    """Of queries that look at more keys than these, if `output` and `logsumexp` are over all of them: context
    parallelism gives the keys in parts. Algorithm 2 of FlashAttention-2 (Dao 2023), all at once.
    """
    dtype = query.dtype
    grad_out_, query, keys, values, output = (
        each.astype(opmath(each.dtype)) for each in (grad_out_, query, keys, values, output)
    )
    factor = _factor(query, scale)
    if blocked_attention.fits(query, keys, values, has_gradients=True) and not grad_input_mask[3]:
        found = blocked_attention.backward(
            grad_out_, query, keys, values, attn_bias, output, logsumexp, is_causal, factor
        )
        return *(each if is_wanted else None for each, is_wanted in zip(found, grad_input_mask)), None
    scores = _scores(query, keys, attn_bias, is_causal, factor, dtype)
    looks_nowhere = (logsumexp == -jnp.inf)[..., None]
    weights = jnp.where(looks_nowhere, 0, jnp.exp(scores - jnp.where(looks_nowhere, 0, logsumexp[..., None])))
    grad_weights = _product(grad_out_, _transposed(values), dtype)
    expected = jnp.sum(grad_out_ * output, -1, keepdims=True)
    if is_16_bit(dtype) and lowered_for() != "tpu":  # there each further sum is a pass over all scores
        # So is `output`. Where these are all keys (to less than that rounding) the weights know it better.
        total = jnp.sum(weights, -1, keepdims=True)
        mean = jnp.sum(weights * grad_weights, -1, keepdims=True) / total
        expected = jnp.where(total > 1 - 2**-12, mean, expected)
    grad_scores = weights * (grad_weights - expected)
    grad_query = _product(grad_scores, keys, dtype) * factor
    grad_key = _sum_of_products(grad_scores, query, keys.shape[1], dtype) * factor
    grad_value = _sum_of_products(weights, grad_out_, values.shape[1], dtype)
    gradients = (grad_query, grad_key, grad_value, _summed_to(grad_scores, attn_bias))
    return tuple(each if is_wanted else None for each, is_wanted in zip(gradients, grad_input_mask))


def _summed_to(gradient: jax.Array, bias: jax.Array | None) -> jax.Array | None:
    """The gradient of what was broadcast."""
    if bias is None:
        return None
    added = gradient.ndim - bias.ndim
    gradient = jnp.sum(gradient, tuple(range(added)))
    return jnp.sum(gradient, [dim for dim, size in enumerate(bias.shape) if size == 1], keepdims=True)
