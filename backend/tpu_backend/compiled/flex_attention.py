"""`torch.nn.attention.flex_attention` in a graph: a softmax over all scores, in float32 (float64 of float64).

The block mask's blocks are not used: its mask function is evaluated for each pair of positions, which XLA
fuses with what surrounds it. The gradient is `jax.vjp` of the whole, and computes the scores again.
"""

from __future__ import annotations

import copy
import math
import types
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch import fx
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from tpu_backend.compiled.subgraph import SubGraph
from tpu_backend.lowering.bounds import IN_RANGE, collect_bounds_checks, require_of_part
from tpu_backend.lowering.matmul import product_precision


def allow_tpu(module: types.ModuleType) -> None:
    """Have Dynamo let tensors of the device through, where PyTorch's front end names the devices it knows."""
    check = module._validate_device
    of_pytorch = types.FunctionType(check.__code__, check.__globals__, "of_pytorch")

    @torch.compiler.substitute_in_graph(check)
    def _validate_device(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        if query.device.type != "tpu":
            of_pytorch(query, key, value)


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
    mask = SubGraph(block_mask[-1], symbols, mask_buffers)
    return _attend(query, key, value, SubGraph(score_mod, symbols), buffers, mask, scale)


def attention_backward(args: Any, kwargs: Any, specs: Any, symbols: Any, take_key: Any) -> Any:
    """The gradients of query, key, value, and a tuple of those of score_mod's buffers."""
    query, key, value, _, _, *slopes = args[:7]
    score_mod, _, block_mask, scale, _, buffers, mask_buffers = args[7:]
    mask = SubGraph(block_mask[-1], symbols, mask_buffers)
    places = [place for place, each in enumerate(buffers) if jnp.issubdtype(each.dtype, jnp.floating)]

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


def _attend(
    query: Any, key: Any, value: Any, score_mod: SubGraph, buffers: Any, mask: SubGraph, scale: Any
) -> Any:
    batch, heads = query.shape[:2]
    groups = heads // key.shape[1]
    key, value = (
        jnp.broadcast_to(each.repeat(groups, axis=1), (batch, heads, *each.shape[2:]))
        for each in (key, value)
    )
    working = jnp.float64 if query.dtype == jnp.float64 else jnp.float32
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

    def one(*values: Any) -> Any:
        (result,), out_of_range = function(*values, *buffers)
        return result, out_of_range

    first = 0 if scores is None else 1
    for dim in reversed(range(4)):
        axes = [0 if each == dim else None for each in range(4)]
        one = jax.vmap(one, in_axes=(*[0] * first, *axes))
    results, out_of_range = one(*([] if scores is None else [scores]), *places)
    require_of_part(function.bounds_checks, [jnp.max(each, initial=IN_RANGE) for each in out_of_range])
    return results


TABLE = {"flex_attention": attention, "flex_attention_backward": attention_backward}
"""Evaluators by the name of the higher-order operator."""

SCORE_MOD = {"flex_attention": 3, "flex_attention_backward": 7}
"""Which argument the score function is."""
