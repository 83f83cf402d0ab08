"""Scaled dot-product attention: a softmax over all scores, and its gradients from the log of their sum.

There are four algorithms: kernels on a TPU (`splash_attention.py`) and on an NVIDIA GPU
(`cudnn_attention.py`), blocks of queries and keys on a CPU (`blocked_attention.py`), and for all else whole
rows (`attention_in_rows.py`), in blocks if they are many.

Sizes: B batch, H heads, L queries, S keys, E features. Keys and values may have fewer heads than queries,
each for a group of query heads in a row. A mask says where to look, a bias is added to the scores; both
broadcast to (B, H, L, S). A mask of integers says of which documents queries and keys are: a query looks at
its own document (`documents.py`). 16-bit tensors are computed in float32; on a TPU their
products are of 16-bit operands, as in its flash kernels. (The registry gives parameters called `key` and
`out` a meaning of their own; here they are `keys` and `output`.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from tpu_backend.attention import default_scale
from tpu_backend.lowering import attention_in_rows, blocked_attention, cudnn_attention, splash_attention
from tpu_backend.lowering.attention_in_rows import Dropout
from tpu_backend.lowering.registry import lowering, opmath


class Kernels(Protocol):
    """A module with the kernels of a platform."""

    def fits(self, query: jax.Array, key: jax.Array, value: jax.Array, bias: jax.Array | None, /) -> bool: ...

    forward: Callable[..., tuple[jax.Array, jax.Array]]
    backward: Callable[..., tuple[jax.Array, jax.Array, jax.Array]]


def _factor(query: jax.Array, scale: jax.Array | None) -> jax.Array:
    return jnp.asarray(default_scale(query.shape[-1]) if scale is None else scale, query.dtype)


def _attention_by(kernels: Kernels) -> Callable[..., Any]:
    """The lowering that takes a platform's kernels where they fit."""

    def attention_by_kernels(
        query, keys, values, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, *, scale=None
    ):  # fmt: skip
        if not kernels.fits(query, keys, values, attn_bias):
            return attention(
                query, keys, values, attn_bias, compute_log_sumexp, dropout_p, is_causal, scale=scale
            )
        found = kernels.forward(
            query, keys, values, attn_bias, is_causal, scale, has_log_sums=compute_log_sumexp
        )
        return *found, None, None

    return attention_by_kernels


@lowering(
    "_scaled_dot_product_efficient_attention",
    runtime=("scale",),
    on={"tpu": _attention_by(splash_attention), "cuda": _attention_by(cudnn_attention)},
)
def attention(
    query, keys, values, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, *, scale=None
):  # fmt: skip
    """Results (B, H, L, F), log sums (B, H, L), which are -inf where a query looks nowhere, and a state of
    dropout that is none."""
    dtype = query.dtype
    query, keys, values = (each.astype(opmath(each.dtype)) for each in (query, keys, values))
    factor = _factor(query, scale)
    if blocked_attention.fits(query, keys, values, has_gradients=compute_log_sumexp):
        output, log_sums = blocked_attention.forward(query, keys, values, attn_bias, is_causal, factor)
    else:
        output, log_sums = attention_in_rows.forward(query, keys, values, attn_bias, is_causal, factor, dtype)
    return output, log_sums if compute_log_sumexp else jnp.zeros((*query.shape[:2], 0)), None, None


def _attention_backward_by(kernels: Kernels) -> Callable[..., Any]:
    def attention_backward_by_kernels(
        grad_out_, query, keys, values, attn_bias, output, logsumexp, philox_seed, philox_offset,
        dropout_p, grad_input_mask, is_causal=False, *, scale=None,
    ):  # fmt: skip
        if not kernels.fits(query, keys, values, attn_bias):
            return attention_backward(
                grad_out_, query, keys, values, attn_bias, output, logsumexp, philox_seed, philox_offset,
                dropout_p, grad_input_mask, is_causal, scale=scale,
            )  # fmt: skip
        found = kernels.backward(
            grad_out_, query, keys, values, attn_bias, output, logsumexp, is_causal, scale
        )
        return *(each if is_wanted else None for each, is_wanted in zip(found, grad_input_mask)), None

    return attention_backward_by_kernels


@lowering(
    "_scaled_dot_product_efficient_attention_backward",
    runtime=("scale",),
    on={"tpu": _attention_backward_by(splash_attention), "cuda": _attention_backward_by(cudnn_attention)},
)
def attention_backward(
    grad_out_, query, keys, values, attn_bias, output, logsumexp, _philox_seed, _philox_offset,
    dropout_p, grad_input_mask, is_causal=False, *, scale=None,
):  # fmt: skip
    """Of queries that look at more keys than these, if `output` and `logsumexp` are over all of them: context
    parallelism gives the keys in parts.
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
        found = *found, None
    else:
        found = attention_in_rows.backward(
            grad_out_, query, keys, values, attn_bias, output, logsumexp, is_causal, factor, dtype,
            has_grad_bias=grad_input_mask[3],
        )  # fmt: skip
    return tuple(each if is_wanted else None for each, is_wanted in zip(found, grad_input_mask))


@lowering("tpu::dropout_attention", runtime=("scale",))
def dropout_attention(query, keys, values, attn_bias, dropout_p, is_causal, scale, *, key):
    """Results (B, H, L, F), log sums (B, H, L), and the two words of the key that decides what is dropped."""
    dtype = query.dtype
    query, keys, values = (each.astype(opmath(each.dtype)) for each in (query, keys, values))
    found = attention_in_rows.forward(
        query, keys, values, attn_bias, is_causal, _factor(query, scale), dtype, Dropout(dropout_p, key)
    )
    return *found, jax.random.key_data(key)


@lowering("tpu::dropout_attention_backward", runtime=("scale",))
def dropout_attention_backward(
    grad, query, keys, values, attn_bias, output, log_sums, drawn, dropout_p, is_causal, scale
):  # fmt: skip
    """Gradients of query, keys and values."""
    dtype = query.dtype
    grad, query, keys, values, output = (
        each.astype(opmath(each.dtype)) for each in (grad, query, keys, values, output)
    )
    key = jax.random.wrap_key_data(drawn.astype(jnp.uint32), impl="threefry2x32")
    return attention_in_rows.backward(
        grad, query, keys, values, attn_bias, output, log_sums, is_causal, _factor(query, scale), dtype,
        dropout=Dropout(dropout_p, key),
    )[:3]  # fmt: skip
