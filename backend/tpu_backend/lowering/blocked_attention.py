"""Attention in blocks of queries and keys: one block's scores in memory (FlashAttention-2, Dao 2023).

The forward pass keeps a running maximum and sum for each query. The backward pass computes the scores again
from the log of that sum. A block that a causal mask or all values of a mask rule out is skipped. Sizes are
those of `attention.py`; the G = H / K query heads that share a head of keys are rows of one matrix.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from tpu_backend.lowering.documents import Documents, documents_of
from tpu_backend.lowering.matmul import matmul
from tpu_backend.lowering.platforms import lowered_for

BLOCK = 256
"""Queries, and keys, of a block. Measured on a CPU with heads of 64: 512 costs a fifth more."""

LENGTH_WITHOUT_GRADIENTS = 1024
"""To this length attention without gradients has all its scores in memory. Sizes that grow by one a turn, as
in generating text, then share padded programs, which know no loops (`padded/rules.py`).
"""


def fits(query: jax.Array, key: jax.Array, value: jax.Array, has_gradients: bool) -> bool:
    """Whether attention of these shapes is computed in blocks: not where one block is all of it.

    Nor on a TPU or a GPU: the turns of a loop over heads would leave their matrix units idle.
    """
    if lowered_for() not in (None, "cpu"):
        return False
    length = BLOCK if has_gradients else LENGTH_WITHOUT_GRADIENTS
    return query.size > 0 and query.shape[2] * key.shape[2] > length**2 and key.shape[1] == value.shape[1]


def forward(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None,
    is_causal: bool,
    factor: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Results (B, H, L, F) and log sums (B, H, L), -inf where a query looks nowhere."""
    grid = _Grid.of(query, key, bias, is_causal)
    queries = grid.query_blocks(query * factor)
    keys, values = grid.keys(key), grid.keys(value)
    features = value.shape[3]

    def of_head(
        head: jax.Array, queries: jax.Array, keys: jax.Array, values: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        def of_queries(i: jax.Array) -> tuple[jax.Array, jax.Array]:
            rows = queries[i]

            def of_keys(j: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
                highest, total, mixed = state
                scores = grid.masked(matmul(rows, keys[j].T), head, i, j)
                higher = jnp.maximum(highest, jnp.max(scores, -1))
                shift = jnp.where(higher == -jnp.inf, 0, higher)
                weights = jnp.exp(scores - shift[:, None])
                kept = jnp.exp(highest - shift)
                total = total * kept + jnp.sum(weights, -1)
                mixed = mixed * kept[:, None] + matmul(weights, values[j])
                return higher, total, mixed

            size = rows.shape[0]
            nothing = (
                jnp.full((size,), -jnp.inf, rows.dtype),
                jnp.zeros((size,), rows.dtype),
                jnp.zeros((size, features), rows.dtype),
            )
            highest, total, mixed = lax.fori_loop(
                grid.first_keys(i), grid.end_of_keys(i), grid.where_seen(of_keys, head, i=i), nothing
            )
            looks_nowhere = total == 0
            total = jnp.where(looks_nowhere, 1, total)
            return mixed / total[:, None], jnp.where(looks_nowhere, -jnp.inf, highest + jnp.log(total))

        return lax.map(of_queries, jnp.arange(grid.num_query_blocks, dtype=jnp.int32))

    def step(head: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        head = jnp.asarray(head, jnp.int32)
        rows = (state[0] if takes_their_place else queries)[head]
        output, log_sums = of_head(head, rows, keys[head], values[head])
        return state[0].at[head].set(output), state[1].at[head].set(log_sums)

    # Results take the place of queries: XLA would keep zeros for the results of every layer from the start.
    takes_their_place = features == query.shape[3]
    results = queries if takes_their_place else jnp.zeros((*queries.shape[:-1], features), queries.dtype)
    nothing = results, jnp.zeros(queries.shape[:-1], queries.dtype)
    output, log_sums = lax.fori_loop(jnp.int32(0), jnp.int32(grid.num_heads), step, nothing)
    return grid.whole(output), grid.whole(log_sums)


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
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of query, key and value. `output` and `log_sums` may be over more keys than these.

    As in FlashAttention, what the gradients of a query's scores have in common is taken from `output`, which
    16-bit numbers have rounded.
    """
    grid = _Grid.of(query, key, bias, is_causal)
    queries = grid.query_blocks(query * factor)
    grads = grid.query_blocks(grad_out)
    # Of a query that looks nowhere every score is -inf: with a sum of 1 its weights are 0. So are those of
    # what is padded, whatever a bias adds to it.
    sums = grid.query_blocks(jnp.where(log_sums == -jnp.inf, 0, log_sums).astype(query.dtype), jnp.inf)
    means = grid.query_blocks(jnp.sum(grad_out * output, -1))
    keys, values = grid.keys(key), grid.keys(value)

    def of_head(
        head: jax.Array, queries: jax.Array, keys: jax.Array, values: jax.Array
    ) -> tuple[jax.Array, ...]:
        def of_keys(grad_queries: jax.Array, j: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
            key_rows, value_rows = keys[j], values[j]

            def of_queries(i: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
                grad_queries, grad_keys, grad_values = state
                rows, grad_rows = queries[i], grads[head, i]
                scores = grid.masked(matmul(rows, key_rows.T), head, i, j)
                weights = jnp.exp(scores - sums[head, i][:, None])
                grad_scores = weights * (matmul(grad_rows, value_rows.T) - means[head, i][:, None])
                return (
                    grad_queries.at[i].add(matmul(grad_scores, key_rows)),
                    grad_keys + matmul(grad_scores.T, rows),
                    grad_values + matmul(weights.T, grad_rows),
                )

            nothing = (grad_queries, jnp.zeros_like(key_rows), jnp.zeros_like(value_rows))
            grad_queries, *of_block = lax.fori_loop(
                grid.first_queries(j),
                grid.end_of_queries(j),
                grid.where_seen(of_queries, head, j=j),
                nothing,
            )
            return grad_queries, (of_block[0], of_block[1])

        blocks = jnp.arange(grid.num_key_blocks, dtype=jnp.int32)
        grad_queries, (grad_keys, grad_values) = lax.scan(of_keys, jnp.zeros_like(queries), blocks)
        return grad_queries, grad_keys, grad_values

    def step(head: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        head = jnp.asarray(head, jnp.int32)
        found = of_head(head, *(each[head] for each in state))
        return tuple(each.at[head].set(own) for each, own in zip(state, found))

    # Gradients take the place of what they are the gradients of.
    grad_query, grad_key, grad_value = lax.fori_loop(
        jnp.int32(0), jnp.int32(grid.num_heads), step, (queries, keys, values)
    )
    return grid.whole(grad_query) * factor, grid.whole_keys(grad_key), grid.whole_keys(grad_value)


@dataclass(frozen=True)
class _Grid:
    """How queries and keys are cut into blocks, and who sees whom. What is left over is padded."""

    batch: int
    num_key_heads: int
    group: int
    """Query heads that share a head of keys."""
    num_queries: int
    num_keys: int
    query_size: int
    key_size: int
    is_causal: bool
    bias: jax.Array | None
    """Four dims, each of the whole size (padded) or 1: where True is seen, or what is added."""
    documents: Documents | None
    """Instead of a bias; each of the whole size (padded)."""

    @staticmethod
    def of(query: jax.Array, key: jax.Array, bias: jax.Array | None, is_causal: bool) -> _Grid:
        batch, heads, queries, _ = query.shape
        key_heads, keys = key.shape[1], key.shape[2]
        query_size, key_size = min(BLOCK, queries), min(BLOCK, keys)
        documents = documents_of(bias, queries, keys)
        if documents is not None:
            bias = None
            of_queries = jnp.pad(documents.queries, ((0, 0), (0, -queries % query_size)))
            of_keys = jnp.pad(documents.keys, ((0, 0), (0, -keys % key_size)))
            place = None if documents.place is None else documents.place.astype(jnp.int32)
            documents = Documents(of_queries, of_keys, place, documents.window)
        elif bias is not None:
            bias = bias.reshape((1,) * (4 - bias.ndim) + bias.shape)
            padding = [
                (0, 0 if size == 1 else -size % block)
                for size, block in zip(bias.shape, (1, 1, query_size, key_size))
            ]
            bias = jnp.pad(bias, padding)
        group = heads // key_heads
        return _Grid(batch, key_heads, group, queries, keys, query_size, key_size, is_causal, bias, documents)

    @property
    def num_query_blocks(self) -> int:
        return math.ceil(self.num_queries / self.query_size)

    @property
    def num_key_blocks(self) -> int:
        return math.ceil(self.num_keys / self.key_size)

    @property
    def num_heads(self) -> int:
        """Of the heads of keys of all sequences."""
        return self.batch * self.num_key_heads

    def query_blocks(self, tensor: jax.Array, fill: float = 0) -> jax.Array:
        """(B, H, L, ...) as (B * K, blocks, G * rows of a block, ...), padded with `fill`."""
        padding = [(0, 0)] * tensor.ndim
        padding[2] = (0, -self.num_queries % self.query_size)
        parts = jnp.pad(tensor, padding, constant_values=fill).reshape(
            -1, self.group, self.num_query_blocks, self.query_size, *tensor.shape[3:]
        )
        return jnp.swapaxes(parts, 1, 2).reshape(parts.shape[0], self.num_query_blocks, -1, *tensor.shape[3:])

    def whole(self, blocks: jax.Array) -> jax.Array:
        """What `query_blocks` made of (B, H, L, ...) as it was."""
        features = blocks.shape[3:]
        parts = blocks.reshape(*blocks.shape[:2], self.group, self.query_size, *features)
        rows = jnp.swapaxes(parts, 1, 2).reshape(self.batch, self.num_key_heads * self.group, -1, *features)
        return rows[:, :, : self.num_queries]

    def keys(self, tensor: jax.Array) -> jax.Array:
        """(B, K, S, E) as (B * K, blocks, rows of a block, E)."""
        padded = jnp.pad(tensor, ((0, 0), (0, 0), (0, -self.num_keys % self.key_size), (0, 0)))
        return padded.reshape(-1, self.num_key_blocks, self.key_size, tensor.shape[3])

    def whole_keys(self, blocks: jax.Array) -> jax.Array:
        """What `keys` made of (B, K, S, E) as it was."""
        rows = blocks.reshape(self.batch, self.num_key_heads, -1, blocks.shape[-1])
        return rows[:, :, : self.num_keys]

    @property
    def place(self) -> jax.Array:
        """Of the first query among the keys."""
        if self.documents is None or self.documents.place is None:
            return jnp.int32(0)
        return self.documents.place

    @property
    def window(self) -> int | None:
        return self.documents.window if self.documents is not None and self.is_causal else None

    def first_keys(self, i: jax.Array) -> jax.Array:
        """The first block of keys that a query of block `i` sees."""
        if self.window is None:
            return jnp.int32(0)
        return jnp.maximum(self.place + i * self.query_size - self.window + 1, 0) // self.key_size

    def end_of_keys(self, i: jax.Array) -> jax.Array:
        """The first block of keys that no query of block `i` sees, nor any later one."""
        if not self.is_causal:
            return jnp.int32(self.num_key_blocks)
        last = self.place + (i + 1) * self.query_size - 1
        return jnp.minimum(last // self.key_size + 1, self.num_key_blocks)

    def first_queries(self, j: jax.Array) -> jax.Array:
        """The first block of queries that sees a key of block `j`."""
        if not self.is_causal:
            return jnp.int32(0)
        return jnp.maximum(j * self.key_size - self.place, 0) // self.query_size

    def end_of_queries(self, j: jax.Array) -> jax.Array:
        """The first block of queries that sees no key of block `j`, nor does any later one."""
        if self.window is None:
            return jnp.int32(self.num_query_blocks)
        last = (j + 1) * self.key_size + self.window - 2 - self.place
        return jnp.clip(last // self.query_size + 1, 0, self.num_query_blocks)

    def _bias(self, head: jax.Array, i: jax.Array, j: jax.Array) -> jax.Array:
        """Of a block, (G or 1, rows or 1, columns or 1): where True is seen, or what is added."""
        if self.documents is not None:
            rows, columns = (
                lax.dynamic_slice(
                    ids, (jnp.int32(0) if ids.shape[0] == 1 else head // self.num_key_heads, start), (1, size)
                )
                for ids, start, size in (
                    (self.documents.queries, i * self.query_size, self.query_size),
                    (self.documents.keys, j * self.key_size, self.key_size),
                )
            )
            return rows[:, :, None] == columns[:, None, :]
        assert self.bias is not None
        sizes = (1, self.group, self.query_size, self.key_size)
        starts = (
            head // self.num_key_heads,
            head % self.num_key_heads * self.group,
            i * self.query_size,
            j * self.key_size,
        )
        is_whole = [size > 1 for size in self.bias.shape]
        return lax.dynamic_slice(
            self.bias,
            [start if whole else jnp.int32(0) for start, whole in zip(starts, is_whole)],
            [size if whole else 1 for size, whole in zip(sizes, is_whole)],
        )[0]

    def where_seen(self, body, head: jax.Array, i=None, j=None):
        """A loop's body, left out where the mask rules out all of a block."""
        if self.bias is None and self.documents is None:
            return body

        def guarded(index: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            block = self._bias(head, index if i is None else i, index if j is None else j)
            seen = block if block.dtype == jnp.bool_ else block != -jnp.inf
            return lax.cond(jnp.any(seen), body, lambda _, state: state, index, state)

        return guarded

    def masked(self, scores: jax.Array, head: jax.Array, i: jax.Array, j: jax.Array) -> jax.Array:
        """The scores (G * rows, columns) of a block, -inf where a query does not look."""
        shape = self.group, self.query_size, self.key_size
        scores = scores.reshape(shape)
        if self.bias is not None or self.documents is not None:
            block = self._bias(head, i, j)
            scores = jnp.where(block, scores, -jnp.inf) if block.dtype == jnp.bool_ else scores + block
        rows = i * self.query_size + jnp.arange(self.query_size, dtype=jnp.int32)[:, None]
        columns = j * self.key_size + jnp.arange(self.key_size, dtype=jnp.int32)
        if self.is_causal:
            distances = self.place + rows - columns
            is_seen = distances >= 0
            if self.window is not None:
                is_seen &= distances < self.window
            scores = jnp.where(is_seen, scores, -jnp.inf)
        if self.num_keys % self.key_size:
            scores = jnp.where(columns < self.num_keys, scores, -jnp.inf)
        return scores.reshape(-1, self.key_size)
