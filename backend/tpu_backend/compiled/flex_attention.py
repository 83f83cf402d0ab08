"""`torch.nn.attention.flex_attention` in a graph: a softmax in float32 (float64 of float64).

With a block mask of several blocks only those are computed that it has (`flex_blocks`). Otherwise all scores
are. The mask function is evaluated for each pair of positions, which XLA fuses with what surrounds it. The
gradient is `jax.vjp` of the whole, and computes the scores again.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch import fx
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from tpu_backend.compiled import flex_blocks
from tpu_backend.compiled.flex_blocks import Attention, Blocks
from tpu_backend.compiled.subgraph import SubGraph
from tpu_backend.lowering.bounds import IN_RANGE, collect_bounds_checks, require_of_part
from tpu_backend.lowering.matmul import product_precision


def in_working_precision(score_mod: fx.GraphModule) -> fx.GraphModule:
    """The same, of a score that is not rounded to 16 bits, which is what eager mode gives it."""
    values = [node.meta["val"] for node in score_mod.graph.find_nodes(op="placeholder")]
    if values[0].dtype not in (torch.bfloat16, torch.float16):
        return score_mod
    widened = copy.deepcopy(score_mod)
    mode = values[0].fake_mode
    with mode:
        values[0] = torch.empty((), dtype=torch.float32, device=values[0].device)
    FakeTensorProp(widened, mode).propagate_dont_convert_inputs(*values)
    return widened


def attention(args: Any, kwargs: Any, specs: Any, symbols: Any, take_key: Any) -> Any:
    """(query [B, Hq, Q, D], key [B, Hkv, K, D], value [B, Hkv, K, E], score_mod, block_mask, scale, options,
    buffers of score_mod, buffers of the mask) -> (result [B, Hq, Q, E], log2-sum-exp2 [B, Hq, Q], maximum of
    the scores in the same unit).
    """
    query, key, value, score_mod, block_mask, scale, _, buffers, mask_buffers = args
    mask, score = SubGraph(block_mask[-1], symbols, mask_buffers), SubGraph(score_mod, symbols)
    if not Blocks.are_several(block_mask, query.shape[2], key.shape[2]):
        return _attend(query, key, value, score, buffers, mask, scale)
    attention = _in_blocks(query, key, value, score, block_mask, mask, scale)
    *found, out_of_range = flex_blocks.forward(attention, buffers)
    require_of_part([*score.bounds_checks, *mask.bounds_checks], out_of_range)
    result, logarithms, highest = found
    return [result, logarithms / math.log(2), highest / math.log(2)]


def attention_backward(args: Any, kwargs: Any, specs: Any, symbols: Any, take_key: Any) -> Any:
    """The gradients of query, key, value, and a tuple of those of score_mod's buffers."""
    query, key, value, result, sums, *slopes = args[:7]
    score_mod, _, block_mask, scale, _, buffers, mask_buffers = args[7:]
    mask = SubGraph(block_mask[-1], symbols, mask_buffers)
    places = [place for place, each in enumerate(buffers) if jnp.issubdtype(each.dtype, jnp.floating)]
    if Blocks.are_several(block_mask, query.shape[2], key.shape[2]):
        score, logarithms = SubGraph(score_mod, symbols), sums * math.log(2)
        attention = _in_blocks(query, key, value, score, block_mask, mask, scale)
        of_result, of_sums = (
            jnp.zeros_like(output) if each is None else each.astype(output.dtype)
            for output, each in zip((result, sums), slopes, strict=True)
        )
        gradients, _ = flex_blocks.backward(
            attention, buffers, places, (result, logarithms), (of_result, of_sums / math.log(2))
        )
        of_query, of_key, of_value, *of_chosen = gradients
        found = dict(zip(places, of_chosen, strict=True))
        return [
            of_query.astype(query.dtype),
            _of_own_heads(of_key, key),
            _of_own_heads(of_value, value),
            [found.get(place) for place in range(len(buffers))],
        ]

    def forward(query: Any, key: Any, value: Any, *chosen: Any) -> Any:
        given = list(buffers)
        for place, buffer in zip(places, chosen, strict=True):
            given[place] = buffer
        return _attend(query, key, value, SubGraph(score_mod, symbols), given, mask, scale)[:2]

    with collect_bounds_checks():  # made in forward
        outputs, transpose = jax.vjp(forward, query, key, value, *(buffers[place] for place in places))
        given = [
            jnp.zeros_like(output) if each is None else each.astype(output.dtype)
            for output, each in zip(outputs, slopes, strict=True)
        ]
        of_query, of_key, of_value, *of_chosen = transpose(given)
    found = dict(zip(places, of_chosen, strict=True))
    return [of_query, of_key, of_value, [found.get(place) for place in range(len(buffers))]]


def _in_blocks(
    query: Any, key: Any, value: Any, score_mod: SubGraph, block_mask: Any, mask: SubGraph, scale: Any
) -> Attention:
    blocks = Blocks(block_mask, query.shape[2], key.shape[2])
    working = _working(query)

    def scores(raw: Any, *places: Any, buffers: Any) -> Any:
        return _checked(score_mod, raw, *places, buffers=buffers)

    return Attention(
        blocks,
        blocks.padded(query, is_of_keys=False),
        blocks.padded(_of_all_heads(key, query), is_of_keys=True),
        blocks.padded(_of_all_heads(value, query), is_of_keys=True),
        scores,
        lambda *places: _checked(mask, None, *places),
        lambda equation, left, right: _product(equation, left, right, working),
        scale,
    )


def _working(query: Any) -> Any:
    return jnp.float64 if query.dtype == jnp.float64 else jnp.float32


def _of_all_heads(each: Any, query: Any) -> Any:
    """Keys or values of groups of heads, for each head of the queries."""
    batch, heads = query.shape[:2]
    return jnp.broadcast_to(each.repeat(heads // each.shape[1], axis=1), (batch, heads, *each.shape[2:]))


def _of_own_heads(gradient: Any, each: Any) -> Any:
    """The gradient of `_of_all_heads`."""
    batch, heads = each.shape[:2]
    groups = gradient.shape[1] // heads
    summed = gradient.reshape(-1, heads, groups, *gradient.shape[2:]).sum(2)
    return (summed.sum(0, keepdims=True) if batch == 1 else summed).astype(each.dtype)


def _attend(
    query: Any, key: Any, value: Any, score_mod: SubGraph, buffers: Any, mask: SubGraph, scale: Any
) -> Any:
    key, value = (_of_all_heads(each, query) for each in (key, value))
    working = _working(query)
    scores = _product("bhqd,bhkd->bhqk", query, key, working) * scale
    places = [jnp.arange(size, dtype=jnp.int32) for size in scores.shape]
    scores = _elementwise(score_mod, scores, *places, buffers=buffers).astype(working)
    scores = jnp.where(_elementwise(mask, None, *places), scores, -jnp.inf)
    highest = jax.lax.stop_gradient(scores.max(axis=-1))
    is_masked = highest == -jnp.inf  # a row without a key is zeros, not NaN
    exponents = jnp.exp(scores - jnp.where(is_masked, 0, highest)[..., None])
    total = exponents.sum(axis=-1)
    weights = exponents / jnp.where(is_masked, 1, total)[..., None]
    log_total = jnp.where(is_masked, -jnp.inf, highest + jnp.log(jnp.where(is_masked, 1, total)))
    result = _product("bhqk,bhke->bhqe", weights.astype(query.dtype), value, working).astype(query.dtype)
    return [result, log_total / math.log(2), highest / math.log(2)]


def _product(equation: str, left: Any, right: Any, dtype: Any) -> jax.Array:
    precision = product_precision(left.dtype)
    return jnp.einsum(equation, left, right, precision=precision, preferred_element_type=dtype)


def _elementwise(function: SubGraph, scores: Any, *places: jax.Array, buffers: Any = ()) -> jax.Array:
    """The function of (score,) batch, head, query and key positions for each, over all of them."""
    results, out_of_range = _checked(function, scores, *places, buffers=buffers)
    require_of_part(function.bounds_checks, out_of_range)
    return results


def _checked(
    function: SubGraph, scores: Any, *places: jax.Array, buffers: Any = ()
) -> tuple[jax.Array, list[jax.Array]]:
    """`_elementwise`, and what its bounds checks found."""

    def one(*values: Any) -> Any:
        (result,), out_of_range = function(*values, *buffers)
        return result, out_of_range

    first = 0 if scores is None else 1
    for dim in reversed(range(4)):
        axes = [0 if each == dim else None for each in range(4)]
        one = jax.vmap(one, in_axes=(*[0] * first, *axes))
    results, out_of_range = one(*([] if scores is None else [scores]), *places)
    return results, [jnp.max(each, initial=IN_RANGE) for each in out_of_range]


TABLE = {"flex_attention": attention, "flex_attention_backward": attention_backward}
"""Evaluators by the name of the higher-order operator."""

SCORE_MOD = {"flex_attention": 3, "flex_attention_backward": 7}
"""Which argument the score function is."""
