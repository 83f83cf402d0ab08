"""Attention by JAX's own Pallas kernels for TPUs: scores stay on the chip, and memory grows with the length.

The kernels are those of splash attention: one for the results and their log sums, and two for the gradients
(dq; dk and dv), which compute the scores again from the log sums. Sizes are those of `attention.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.xla_metadata import set_xla_metadata

from tpu_backend.attention import BLOCKS, default_scale, is_kernel_on_tpu, padded_length
from tpu_backend.lowering.documents import Documents, documents_of
from tpu_backend.lowering.platforms import lowered_for

COMPUTED = 512
"""Keys of a block that are computed at once."""


@cache
def _library() -> tuple[Any, Any]:
    """JAX's kernels, and their masks: imported where a TPU's program needs them."""
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_kernel,
        splash_attention_mask,
    )

    return splash_attention_kernel, splash_attention_mask


def fits(query: jax.Array, key: jax.Array, value: jax.Array, bias: jax.Array | None) -> bool:
    """Whether the kernels compute it."""
    shapes = query.shape, key.shape, value.shape
    mask = None if bias is None else (bias.shape, str(bias.dtype))
    return lowered_for() == "tpu" and is_kernel_on_tpu(*shapes, str(query.dtype), mask)


def forward(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    documents: jax.Array | None,
    is_causal: bool,
    scale: jax.Array | None,
    has_log_sums: bool = True,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Results (B, H, L, F) and float32 log sums (B, H, L), or (B, H, 0) without.

    They are 0 and -inf of a query that looks nowhere.
    """

    def of_sequence(ids: Any, *tensors: jax.Array) -> Any:
        found = kernel(*tensors, ids)
        return (found[0], found[1][0]) if needs_log_sums else (found, jnp.zeros((query.shape[1], 0)))

    length = query.shape[2]
    said = documents_of(documents, length, key.shape[2])
    may_look_nowhere = said is not None and said.keys is not said.queries
    needs_log_sums = has_log_sums or may_look_nowhere
    said = _padded_documents(said, length, key.shape[2], is_causal)
    query, key, value = map(_padded, (query, key, value))
    with jax.enable_x64(False), _noting_work(query, key, value, is_causal, said):
        kernel = _kernel(query, key, is_causal, said, needs_log_sums, interpret)
        output, log_sums = _of_sequences(of_sequence, said, _scaled(query, scale), key, value)
        if may_look_nowhere:
            # To the kernels all scores of such a query are the same: their masked value, and no -inf.
            looks_nowhere = log_sums < kernel.kwargs["mask_value"] / 2
            output = jnp.where(looks_nowhere[..., None], 0, output)
            log_sums = jnp.where(looks_nowhere, -jnp.inf, log_sums)
        return output[:, :, :length], log_sums[..., : length if has_log_sums else 0]


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
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of query, key and value. `output` and `log_sums` may be over more keys than these."""

    def of_sequence(ids: Any, query: jax.Array, key: jax.Array, value: jax.Array, *others: jax.Array) -> Any:
        output, log_sums, grad = others
        kernels, _ = _library()
        kept = query, key, value, ids, None, output, log_sums, kernel.dq_mask_info, kernel.dkv_mask_info
        # The library differentiates its own results alone: log sums of others need its inner function.
        return kernels._splash_attention_bwd(**kernel.kwargs, res=kept, do=grad)[3:6]

    length, num_keys = query.shape[2], key.shape[2]
    said = documents_of(documents, length, num_keys)
    said = _padded_documents(said, length, num_keys, is_causal)
    # Weights are exp(score - log sum): those of a query that looks nowhere, or is padding, become 0.
    log_sums = _padded(jnp.where(log_sums == -jnp.inf, jnp.inf, log_sums), jnp.inf)
    query, key, value, output, grad_out = map(_padded, (query, key, value, output, grad_out))
    with jax.enable_x64(False), _noting_work(query, key, value, is_causal, said):
        kernel = _kernel(query, key, is_causal, said, True, interpret)
        given = _scaled(query, scale), key, value, output, log_sums, grad_out
        grad_query, grad_key, grad_value = _of_sequences(of_sequence, said, *given)
        grad_query = _scaled(grad_query, scale)
        return grad_query[:, :, :length], grad_key[:, :, :num_keys], grad_value[:, :, :num_keys]


def _padded(tensor: jax.Array, with_value: float = 0.0) -> jax.Array:
    """(B, H, L, ...) with as many queries or keys as a kernel computes."""
    missing = padded_length(tensor.shape[2]) - tensor.shape[2]
    if not missing:
        return tensor
    sizes = [(0, missing if dim == 2 else 0) for dim in range(tensor.ndim)]
    return jnp.pad(tensor, sizes, constant_values=with_value)


def _padded_documents(
    documents: Documents | None, queries: int, keys: int, is_causal: bool
) -> Documents | None:
    """With padding that no query looks at: it is a document of its own, unless it comes after all that
    a causal mask shows.
    """
    if padded_length(keys) == keys and padded_length(queries) == queries:
        return documents
    if documents is None:
        if padded_length(keys) == keys or (is_causal and queries == keys):
            return None
        of_queries, of_keys = (jnp.zeros((1, length), jnp.int32) for length in (queries, keys))
        documents = Documents(of_queries, of_keys, None)
    is_same = documents.keys is documents.queries
    of_queries, of_keys = (each.astype(jnp.int32) for each in documents[:2])
    last = jnp.maximum(of_queries.max(), of_keys.max())
    first = jnp.minimum(of_queries.min(), of_keys.min())
    own = jnp.where(last < jnp.iinfo(jnp.int32).max, last + 1, first - 1)

    def padded(ids: jax.Array) -> jax.Array:
        missing = padded_length(ids.shape[1]) - ids.shape[1]
        return jnp.pad(ids, ((0, 0), (0, missing)), constant_values=own)

    of_queries = padded(of_queries)
    return documents._replace(queries=of_queries, keys=of_queries if is_same else padded(of_keys))


def _scaled(query: jax.Array, scale: jax.Array | None) -> jax.Array:
    factor = jnp.asarray(default_scale(query.shape[-1]) if scale is None else scale, jnp.float32)
    return (query.astype(jnp.float32) * factor).astype(query.dtype)


def _of_sequences(
    function: Callable[..., Any], documents: Documents | None, *tensors: jax.Array
) -> tuple[jax.Array, ...]:
    """The results of each sequence of a batch, given its documents (or None) and its tensors."""
    if documents is None:
        return jax.vmap(lambda *each: function(None, *each))(*tensors)
    kernels, _ = _library()
    batch = tensors[0].shape[0]
    queries, keys = (
        jnp.broadcast_to(ids.astype(jnp.int32), (batch, ids.shape[1]))
        for ids in (documents.queries, documents.keys)
    )
    return jax.vmap(lambda queries, keys, *each: function(kernels.SegmentIds(queries, keys), *each))(
        queries, keys, *tensors
    )


def _block(length: int) -> int:
    return next(size for size in BLOCKS if length % size == 0)


def _noting_work(
    query: jax.Array, key: jax.Array, value: jax.Array, is_causal: bool, documents: Documents | None
) -> Any:
    """Kernels made in here say in the compiled program how many pairs of a query and a key their blocks have,
    over all heads and sequences, and the features of keys and values (`tpu_backend.hlo.AttentionKernel`). Of
    queries whose place is data: on average over all places.
    """
    queries, keys = query.shape[2], key.shape[2]
    rows, columns = _block(queries), _block(keys)
    has_place = documents is not None and documents.place is not None
    window = keys if documents is None or documents.window is None else documents.window
    pairs = 0
    for end in range(rows, queries + 1, rows):
        if not is_causal:
            seen = keys
        elif has_place:
            seen = min(keys // 2, -(-(window + rows) // columns) * columns)
        else:
            first = max(end - rows - window + 1, 0) // columns * columns
            seen = min(keys, -(-end // columns) * columns) - first
        pairs += rows * seen
    pairs *= query.shape[0] * query.shape[1]
    return set_xla_metadata(attention=f"{pairs} {key.shape[3]} {value.shape[3]}")


def _kernel(
    query: jax.Array,
    key: jax.Array,
    is_causal: bool,
    documents: Documents | None,
    has_log_sums: bool,
    interpret: bool,
) -> Any:
    kernels, _ = _library()
    place = documents.place if is_causal and documents is not None else None
    window = None if documents is None else documents.window
    mask = _mask(query.shape[1], query.shape[2], key.shape[2], is_causal and place is None, window)
    rows, columns = _block(query.shape[2]), _block(key.shape[2])
    sizes = kernels.BlockSizes(
        block_q=rows,
        block_kv=columns,
        block_kv_compute=COMPUTED,
        block_q_dkv=rows,
        block_kv_dkv=columns,
        block_kv_dkv_compute=COMPUTED,
        block_q_dq=rows,
        block_kv_dq=columns,
    )
    kernel = kernels.make_splash_mha(
        mask,
        block_sizes=sizes,
        head_shards=1,
        q_seq_shards=1,
        save_residuals=has_log_sums,
        interpret=interpret,
    )
    if place is None:
        return kernel
    by_query, by_key = (
        kernel.fwd_mask_info._replace(**said)
        for said in _causal_from(place.astype(jnp.int32), query.shape[2], key.shape[2], window)
    )
    kernel.kwargs["mask_function"] = _seen_within(window)
    return kernels.SplashAttentionKernel(by_query, by_query, by_key, **kernel.kwargs)


@cache
def _mask(heads: int, queries: int, keys: int, is_causal: bool, window: int | None) -> Any:
    _, masks = _library()
    shape = queries, keys
    if not is_causal:
        mask = masks.FullMask(shape)
    elif window is None:
        mask = masks.CausalMask(shape)
    else:
        mask = masks.LocalMask(shape, window_size=(window - 1, 0), offset=0)
    return masks.MultiHeadMask([mask] * heads)


@cache
def _seen_within(window: int | None) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Which keys queries see, both by their places."""

    def is_seen(queries: jax.Array, keys: jax.Array) -> jax.Array:
        is_earlier = queries >= keys
        return is_earlier if window is None else is_earlier & (queries - keys < window)

    return is_seen


def _causal_from(
    place: jax.Array, queries: int, keys: int, window: int | None
) -> tuple[dict[str, jax.Array], ...]:
    """A causal mask in the library's words, of queries whose first one has a place that is data.

    For kernels that go over the keys of each block of queries, and for the one that goes over the queries of
    each block of keys. The library makes such numbers with NumPy, and its kernels read them as data.
    """
    rows, columns = _block(queries), _block(keys)
    row, column = (
        jnp.arange(length // block, dtype=jnp.int32) for length, block in ((queries, rows), (keys, columns))
    )
    row, place = row[:, None], jnp.maximum(place, 0)
    last = (place + (row + 1) * rows - 1) // columns  # block of keys that these queries see
    first_row = jnp.maximum(column * columns - place, 0) // rows  # block of queries that see these keys
    last_row = jnp.full_like(column, queries // rows - 1)
    first = jnp.zeros_like(row)
    if window is not None:
        first = jnp.maximum(place + row * rows - window + 1, 0) // columns
        last_row = jnp.minimum(((column + 1) * columns + window - 2 - place) // rows, last_row)
    # What is not computed is not fetched: the block before it stays, or the one after it comes early.
    fetched = (
        jnp.clip(column, jnp.minimum(first, keys // columns - 1), last),
        jnp.clip(row, jnp.minimum(first_row, queries // rows - 1), jnp.maximum(last_row, 0)),
    )
    same = {
        "block_mask": ((first <= column) & (column <= last)).astype(jnp.int32)[None],
        "q_sequence": place + jnp.arange(queries, dtype=jnp.int32),
    }
    return tuple({"data_next": each[None], **same} for each in fetched)
