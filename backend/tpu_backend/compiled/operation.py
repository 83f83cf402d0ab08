"""A compiled graph as one operator of the dispatcher: a call of it is one entry of the op stream."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import torch
from torch import fx
from torch.library import Library
from torch.utils.checkpoint import CheckpointPolicy

from tpu_backend import _C
from tpu_backend.compiled.graph import Graph, Symbols, concrete
from tpu_backend.compiled.made_again import why_again
from tpu_backend.lowering.registry import lowering
from tpu_backend.runtime.causes import graphs_made_again
from tpu_backend.runtime.range_errors import nodes_of_graphs
from tpu_backend.untraced import untraced

NAMESPACE = "tpu_graph"
_library = Library(NAMESPACE, "FRAGMENT")
_numbers = itertools.count()
_AGAIN = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


def make_operator(name: str, graph: Graph, wanted: Sequence[fx.Node]) -> Callable[..., list[torch.Tensor]]:
    """An operator (tensors, sizes) -> the values of the nodes `wanted`, for the placeholders of `graph`.

    Registered for the life of the process, as compiled programs are. What the graph computes again, under
    activation checkpointing, XLA must not take for what it computed before: that would be kept instead.
    """
    numbered = f"{name}_{next(_numbers)}"
    qualified = f"{NAMESPACE}::{numbered}"
    _library.define(f"{numbered}(Tensor[] tensors, int[] sizes) -> Tensor[]")
    places = places_of(graph)
    values = [node.meta["val"] for node in wanted]
    recomputes = name == "backward" and any(node.meta.get("recompute") in _AGAIN for node in graph.nodes)

    def placed(tensors: Sequence[Any], sizes: Sequence[int]) -> list[Any]:
        """Tensors and sizes in the order of the placeholders."""
        inputs: list[Any] = [None] * len(graph.placeholders)
        for where, given in zip(places, (tensors, sizes), strict=True):
            for place, value in zip(where, given, strict=False):  # a graph without tensors is given one
                inputs[place] = value
        return inputs

    def compute(
        tensors: list[jax.Array], sizes: Sequence[int], *, key: jax.Array | None = None
    ) -> list[jax.Array]:
        if recomputes:
            tensors = jax.lax.optimization_barrier(tensors)
        inputs = placed(tensors, sizes)
        return graph.evaluate(wanted, inputs, graph.bind(inputs), key)

    def infer(tensors: Sequence[torch.Tensor], sizes: Sequence[int]) -> list[torch.Tensor]:
        symbols = graph.bind(placed(tensors, sizes))
        return [_like(value, symbols) for value in values]

    if (why := why_again(qualified)) is not None:
        graphs_made_again[qualified] = why
    nodes_of_graphs[qualified] = graph.described
    lowering(qualified, draws=graph.num_draws)(compute)
    _C.register_lowered_ops([(qualified, qualified, [], [], [], graph.num_draws, {})])
    _library.impl(numbered, untraced(infer), "Meta")
    return getattr(getattr(torch.ops, NAMESPACE), numbered).default


def places_of(graph: Graph) -> tuple[list[int], list[int]]:
    """Which placeholders are tensors, and which are sizes. Others, such as a DeviceMesh, pass through."""
    values = [node.meta["val"] for node in graph.placeholders]
    tensors = [place for place, value in enumerate(values) if isinstance(value, torch.Tensor)]
    return tensors, [place for place, value in enumerate(values) if isinstance(value, (int, torch.SymInt))]


def _like(value: torch.Tensor, symbols: Symbols) -> torch.Tensor:
    """What Dynamo expects of an output; where that is not dense, a contiguous one."""
    sizes = [concrete(size, symbols) for size in value.shape]
    strides = [concrete(stride, symbols) for stride in value.stride()]
    shaped = torch.empty_strided(sizes, strides, dtype=value.dtype, device="meta")
    if torch.ops.aten.is_non_overlapping_and_dense(shaped):
        return shaped
    return torch.empty(sizes, dtype=value.dtype, device="meta")
