"""flex_attention by the blocks of its `BlockMask`: those that it rules out are not computed.

Each block of queries walks over the blocks of keys that some batch and head has (`Blocks.order`), with a
softmax that goes on from block to block (Milakov and Gimelshein, 2018). No more scores are in memory than of
one block. The gradient walks alike, with the sums of the forward pass (Dao et al., 2022, algorithm 4).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from tpu_backend.lowering.bounds import IN_RANGE

Arrays = Sequence[jax.Array]
Scores = Callable[..., tuple[jax.Array, list[jax.Array]]]
"""(raw scores, places of batch, heads, queries and keys, buffers) -> (scores, what was out of range)."""
Allowed = Callable[..., tuple[jax.Array, list[jax.Array]]]
"""(places) -> (whether a query sees a key, what was out of range)."""
Product = Callable[[str, jax.Array, jax.Array], jax.Array]


class Blocks:
    """Which blocks of scores there are."""

    def __init__(self, block_mask: Sequence[Any], num_queries: int, num_keys: int):
        """`block_mask`: `BlockMask.as_tuple()`, with its arrays."""
        self.rows, self.columns = (int(size) for size in block_mask[-3:-1])
        self.num_queries, self.num_keys = num_queries, num_keys
        self.num_rows, self.num_columns = -(-num_queries // self.rows), -(-num_keys // self.columns)
        there = self._listed(*block_mask[2:4])
        if block_mask[4] is not None:
            there |= self._listed(*block_mask[4:6])
        self.there = there  # of batches and heads, or of one that stands for all
        anywhere = there.any((0, 1))
        self.count = anywhere.sum(-1, dtype=jnp.int32)
        self.order = jnp.argsort(~anywhere, axis=-1, stable=True).astype(jnp.int32)
        """Of each block of queries the blocks of keys; those that are not there come last."""

    @staticmethod
    def are_several(block_mask: Sequence[Any], num_queries: int, num_keys: int) -> bool:
        rows, columns = block_mask[-3:-1]
        return num_queries > rows or num_keys > columns

    def _listed(self, counts: jax.Array, indices: jax.Array) -> jax.Array:
        counts, indices = counts[..., : self.num_rows], indices[..., : self.num_rows, :]
        is_listed = jnp.arange(indices.shape[-1]) < counts[..., None]
        places = jnp.where(is_listed & (indices < self.num_columns), indices, self.num_columns)
        none = jnp.zeros((*indices.shape[:-1], self.num_columns + 1), bool)
        return jnp.put_along_axis(none, places, True, axis=-1, inplace=False)[..., :-1]

    def padded(self, values: jax.Array, is_of_keys: bool) -> jax.Array:
        """With zeros up to the end of the last block, along the third dim."""
        size = self.num_columns * self.columns if is_of_keys else self.num_rows * self.rows
        widths = [(0, size - values.shape[2] if dim == 2 else 0) for dim in range(values.ndim)]
        return jnp.pad(values, widths)

    def of_queries(self, values: jax.Array, row: Any) -> jax.Array:
        return lax.dynamic_slice_in_dim(values, row * self.rows, self.rows, 2)

    def of_keys(self, values: jax.Array, column: Any) -> jax.Array:
        return lax.dynamic_slice_in_dim(values, column * self.columns, self.columns, 2)

    def places(self, row: Any, column: Any, batch: int, heads: int) -> list[jax.Array]:
        """Positions of the block. What pads the last blocks has the position of the last one."""
        queries = row * self.rows + jnp.arange(self.rows, dtype=jnp.int32)
        keys = column * self.columns + jnp.arange(self.columns, dtype=jnp.int32)
        return [
            jnp.arange(batch, dtype=jnp.int32),
            jnp.arange(heads, dtype=jnp.int32),
            jnp.minimum(queries, self.num_queries - 1),
            jnp.minimum(keys, self.num_keys - 1),
        ]

    def is_there(self, row: Any, column: Any) -> jax.Array:
        """Of a block's keys, for each batch and head: (B, H, 1, columns)."""
        listed = self.there[:, :, row, column][:, :, None, None]
        return listed & (column * self.columns + jnp.arange(self.columns) < self.num_keys)


class Attention(NamedTuple):
    """What both passes have in common. Keys and values have as many heads as queries."""

    blocks: Blocks
    query: jax.Array
    key: jax.Array
    value: jax.Array
    scores: Scores
    allowed: Allowed
    product: Product
    scale: Any

    def raw(self, row: Any, column: Any) -> jax.Array:
        query, key = self.blocks.of_queries(self.query, row), self.blocks.of_keys(self.key, column)
        return self.product("bhqd,bhkd->bhqk", query, key) * self.scale

    def seen(self, row: Any, column: Any) -> tuple[jax.Array, list[jax.Array]]:
        allowed, out_of_range = self.allowed(*self.places(row, column))
        return allowed & self.blocks.is_there(row, column), out_of_range

    def places(self, row: Any, column: Any) -> list[jax.Array]:
        return self.blocks.places(row, column, *self.query.shape[:2])

    def in_range(self, buffers: Arrays) -> list[jax.Array]:
        """Nothing out of range, for each bounds check."""

        def block() -> list[jax.Array]:
            raw, places = self.raw(0, 0), self.places(0, 0)
            return [*self.scores(raw, *places, buffers=buffers)[1], *self.seen(0, 0)[1]]

        return [jnp.asarray(IN_RANGE, jnp.int64)] * len(jax.eval_shape(block))


def forward(attention: Attention, buffers: Arrays) -> tuple[jax.Array, jax.Array, jax.Array, list[jax.Array]]:
    """Result (B, H, Q, E), logarithms of the sums and maxima (B, H, Q), and what was out of range."""
    blocks, value, working = attention.blocks, attention.value, jnp.float32
    if attention.query.dtype == jnp.float64:
        working = jnp.float64
    batch, heads = attention.query.shape[:2]
    in_range = attention.in_range(buffers)

    def of_row(row: Any) -> Any:
        def turn(number: Any, state: Any) -> Any:
            highest, total, result, before = state
            column = blocks.order[row, number]
            places = attention.places(row, column)
            scores, of_scores = attention.scores(attention.raw(row, column), *places, buffers=buffers)
            seen, of_mask = attention.seen(row, column)
            scores = jnp.where(seen, scores.astype(working), -jnp.inf)
            now = jnp.maximum(highest, scores.max(-1))
            shift = jnp.where(now == -jnp.inf, 0, now)
            factor, weights = jnp.exp(highest - shift), jnp.exp(scores - shift[..., None])
            values = blocks.of_keys(value, column)
            added = attention.product("bhqk,bhke->bhqe", weights.astype(values.dtype), values)
            result = result * factor[..., None] + added
            return now, total * factor + weights.sum(-1), result, _worst(before, [*of_scores, *of_mask])

        shape = batch, heads, blocks.rows
        start = (
            jnp.full(shape, -jnp.inf, working),
            jnp.zeros(shape, working),
            jnp.zeros((*shape, value.shape[-1]), working),
            in_range,
        )
        highest, total, result, out_of_range = lax.fori_loop(0, blocks.count[row], turn, start)
        is_masked = total == 0  # a row without a key is zeros, not NaN
        sums = jnp.where(is_masked, 1, total)
        logarithms = jnp.where(is_masked, -jnp.inf, highest + jnp.log(sums))
        return result / sums[..., None], logarithms, highest, out_of_range

    *found, out_of_range = lax.map(of_row, jnp.arange(blocks.num_rows, dtype=jnp.int32))
    result, logarithms, highest = (_joined(each, blocks.num_queries) for each in found)
    return result.astype(attention.query.dtype), logarithms, highest, _over_rows(out_of_range)


def backward(
    attention: Attention,
    buffers: Arrays,
    chosen: Sequence[int],
    output: tuple[jax.Array, jax.Array],
    slopes: tuple[jax.Array, jax.Array],
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Gradients of queries, keys, values and the `chosen` buffers; and what was out of range.

    `output`: result and logarithms of the sums. `slopes`: of both.
    """
    blocks, query, key, value = attention.blocks, attention.query, attention.key, attention.value
    result, logarithms = output
    working = logarithms.dtype
    # What all weights of a query have in common: softmax's gradient, and that of the sum's logarithm.
    common = (slopes[0].astype(working) * result.astype(working)).sum(-1) - slopes[1]
    finite = jnp.where(jnp.isfinite(logarithms), logarithms, 0)
    slope, common, finite = (blocks.padded(each, is_of_keys=False) for each in (slopes[0], common, finite))

    def of_block(row: Any, column: Any) -> Any:
        keys, values = blocks.of_keys(key, column), blocks.of_keys(value, column)
        slope_of_row = blocks.of_queries(slope, row)

        def scores_of(raw: jax.Array, *floats: jax.Array) -> Any:
            given = list(buffers)
            for place, buffer in zip(chosen, floats, strict=True):
                given[place] = buffer
            scores, out_of_range = attention.scores(raw, *attention.places(row, column), buffers=given)
            return scores.astype(working), out_of_range

        floats = [buffers[place] for place in chosen]
        scores, transpose, of_scores = jax.vjp(scores_of, attention.raw(row, column), *floats, has_aux=True)
        seen, of_mask = attention.seen(row, column)
        sums = blocks.of_queries(finite, row)[..., None]
        weights = jnp.where(seen, jnp.exp(scores - sums), 0)
        of_weights = attention.product("bhqe,bhke->bhqk", slope_of_row, values)
        of_scored = weights * (of_weights - blocks.of_queries(common, row)[..., None])
        of_raw, *of_floats = transpose(jnp.where(seen, of_scored, 0))
        of_raw = (of_raw * attention.scale).astype(query.dtype)
        of_query = attention.product("bhqk,bhkd->bhqd", of_raw, keys)
        of_key = attention.product("bhqk,bhqd->bhkd", of_raw, blocks.of_queries(query, row))
        of_value = attention.product("bhqk,bhqe->bhke", weights.astype(slope_of_row.dtype), slope_of_row)
        return of_query, of_key, of_value, of_floats, [*of_scores, *of_mask]

    def of_row(carried: Any, row: Any) -> Any:
        def turn(number: Any, state: Any) -> Any:
            of_query, of_key, of_value, of_floats, before = state
            column = blocks.order[row, number]
            added = of_block(row, column)
            return (
                of_query + added[0],
                _added(of_key, added[1], column * blocks.columns),
                _added(of_value, added[2], column * blocks.columns),
                [first + second for first, second in zip(of_floats, added[3], strict=True)],
                _worst(before, added[4]),
            )

        start = jnp.zeros((*query.shape[:2], blocks.rows, query.shape[-1]), working), *carried
        of_query, *carried = lax.fori_loop(0, blocks.count[row], turn, start)
        return tuple(carried), of_query

    start = (
        jnp.zeros(key.shape, working),
        jnp.zeros(value.shape, working),
        [jnp.zeros_like(buffers[place]) for place in chosen],
        attention.in_range(buffers),
    )
    carried, of_query = lax.scan(of_row, start, jnp.arange(blocks.num_rows, dtype=jnp.int32))
    of_key, of_value, of_floats, out_of_range = carried
    of_keys = [each[:, :, : blocks.num_keys] for each in (of_key, of_value)]
    return [_joined(of_query, blocks.num_queries), *of_keys, *of_floats], out_of_range


def _worst(before: Arrays, now: Arrays) -> list[jax.Array]:
    return [jnp.maximum(first, second) for first, second in zip(before, now, strict=True)]


def _over_rows(out_of_range: Arrays) -> list[jax.Array]:
    return [each.max() for each in out_of_range]


def _joined(rows: jax.Array, length: int) -> jax.Array:
    """(rows of blocks, B, H, a block's rows, ...) -> (B, H, length, ...)."""
    moved = jnp.moveaxis(rows, 0, 2)
    return moved.reshape(*moved.shape[:2], -1, *moved.shape[4:])[:, :, :length]


def _added(sums: jax.Array, part: jax.Array, start: Any) -> jax.Array:
    before = lax.dynamic_slice_in_dim(sums, start, part.shape[2], 2)
    return lax.dynamic_update_slice_in_dim(sums, before + part, start, 2)
