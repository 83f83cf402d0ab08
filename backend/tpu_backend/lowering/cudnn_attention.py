"""Attention by cuDNN's kernels on an NVIDIA GPU: scores stay on the chip, and memory grows with the length.

JAX has the two operations, forward and backward. Sizes are those of `attention.py`. A query sees the keys of
its own document by a bias, which is as large as one head's scores: beyond `MOST_TOGETHER` of them attention
goes by rows.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp

from tpu_backend.attention import MOST_TOGETHER, default_scale
from tpu_backend.lowering.documents import documents_of
from tpu_backend.lowering.platforms import lowered_for

LEAST_LENGTH = 128
"""Queries and keys of the kernels, at least. Shorter attention is a product or two."""

MOST_FEATURES = 128
"""Of a head, on every GPU that has the kernels."""

LEAST_VERSION = 91002
"""Of cuDNN: earlier ones have no windows beside a bias."""


@cache
def _library() -> Any:
    """JAX's operations: imported where a GPU's program needs them."""
    from jax._src.cudnn import fused_attention_stablehlo

    return fused_attention_stablehlo


@cache
def _has_kernels() -> bool:
    """From Ampere on (compute capability 8.0), with a cuDNN as JAX installs it."""
    try:
        version = _library().check_cudnn_version()
        devices = jax.local_devices(backend="cuda")
    except RuntimeError:  # no cuDNN, or no GPU: a program is lowered for one that is not here
        return False
    return version >= LEAST_VERSION and all(float(each.compute_capability) >= 8 for each in devices)


def fits(query: jax.Array, key: jax.Array, value: jax.Array, bias: jax.Array | None) -> bool:
    """Whether the kernels compute it."""
    if lowered_for() != "cuda" or not query.dtype == key.dtype == value.dtype:
        return False
    (batch, _, queries, features), keys = query.shape, key.shape[2]
    documents = documents_of(bias, queries, keys)
    is_seen_by_kernel = bias is None or (
        documents is not None
        and documents.keys is documents.queries
        and queries % 2 == 0
        and batch * queries * keys <= MOST_TOGETHER
    )
    return (
        query.dtype in (jnp.bfloat16, jnp.float16)
        and 0 not in (*query.shape, *key.shape)
        and query.shape[1] % key.shape[1] == 0
        and features == value.shape[3]
        and features % 8 == 0
        and features <= MOST_FEATURES
        and min(queries, keys) >= LEAST_LENGTH
        and is_seen_by_kernel
        and _has_kernels()
    )


def forward(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    documents: jax.Array | None,
    is_causal: bool,
    scale: jax.Array | None,
    has_log_sums: bool = True,
) -> tuple[jax.Array, jax.Array]:
    """Results (B, H, L, F) and float32 log sums (B, H, L), or (B, H, 0) without. `scale`: see `_call`."""
    given, options = _call(query, key, value, documents, is_causal, scale)
    found = _library()._dot_product_attention_fwd_p.bind(*given, **options, is_training=has_log_sums)
    return found[0], found[1] if has_log_sums else jnp.zeros((*query.shape[:2], 0), jnp.float32)


def backward(
    grad_out: jax.Array,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    documents: jax.Array | None,
    output: jax.Array,
    log_sums: jax.Array,
    is_causal: bool,
    scale: jax.Array | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of query, key and value. `output` and `log_sums` may be over more keys than these."""
    given, options = _call(query, key, value, documents, is_causal, scale)
    grad_query, grad_key, grad_value = _library()._dot_product_attention_bwd_p.bind(
        *given, log_sums, output, grad_out, **options
    )
    return _scaled(grad_query, scale), grad_key, grad_value


def _scaled(query: jax.Array, scale: jax.Array | None) -> jax.Array:
    if scale is None:
        return query
    return (query.astype(jnp.float32) * jnp.asarray(scale, jnp.float32)).astype(query.dtype)


def _call(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    documents: jax.Array | None,
    is_causal: bool,
    scale: jax.Array | None,
) -> tuple[list[jax.Array], dict[str, Any]]:
    """What both operations take. A scale that is data multiplies the queries; the kernels' is constant."""
    library = _library()
    said = documents_of(documents, query.shape[2], key.shape[2])
    none = jnp.zeros(0, query.dtype)
    bias = none
    if said is not None:
        is_seen = said.queries[:, None, :, None] == said.keys[:, None, None, :]
        bias = jnp.where(is_seen, 0, library.get_large_negative_number(query.dtype)).astype(query.dtype)
    mask = library.MaskType.CAUSAL if is_causal else library.MaskType.NO_MASK
    options = {
        "scale": default_scale(query.shape[3]) if scale is None else 1.0,
        "seed": 0,
        "dropout_rate": 0.0,
        "variadic_args": (said is not None, False),
        "mask_type": mask,
        "layout": library.AttentionLayout.BNTH.value,
        "sliding_window_length": None if said is None else said.window,
    }
    # After the bias: lengths, offsets and pages of padded, packed and paged sequences, which these are not.
    return [_scaled(query, scale), key, value, bias, *[none] * 6], options
