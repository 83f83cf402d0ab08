"""Attention with dropout, as one operation with a backward of its own. `csrc/aten/attention.cpp` calls it."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.library import Library

from tpu_backend.untraced import untraced

_SCHEMAS = {
    "dropout_attention": "(Tensor query, Tensor keys, Tensor values, Tensor? attn_bias, float dropout_p, "
    "bool is_causal, float? scale) -> (Tensor, Tensor, Tensor)",
    "dropout_attention_backward": "(Tensor grad, Tensor query, Tensor keys, Tensor values, "
    "Tensor? attn_bias, Tensor output, Tensor log_sums, Tensor drawn, float dropout_p, bool is_causal, "
    "float? scale) -> (Tensor, Tensor, Tensor)",
}


@cache
def register() -> Library:
    """Define the operators, for the life of the process. Idempotent."""
    library = Library("tpu", "FRAGMENT")
    for name, infer in (("dropout_attention", _infer), ("dropout_attention_backward", _infer_backward)):
        # What decides what is dropped is drawn in the first: no graph may compute it again.
        tags = (torch.Tag.nondeterministic_seeded,) if infer is _infer else ()
        library.define(name + _SCHEMAS[name], tags=tags)
        library.impl(name, untraced(infer), "Meta")
    return library


def _infer(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    attn_bias: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> tuple[Tensor, ...]:
    wide = torch.promote_types(query.dtype, torch.float32)
    return (
        query.new_empty((*query.shape[:3], values.shape[3])),
        query.new_empty(query.shape[:3], dtype=wide),
        query.new_empty((2,), dtype=torch.int64),
    )


def _infer_backward(
    grad: Tensor,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    attn_bias: Tensor | None,
    output: Tensor,
    log_sums: Tensor,
    drawn: Tensor,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> tuple[Tensor, ...]:
    """Gradients; that of the keys lies as the CPU's, which is the transpose of a product."""
    of_query, of_keys, of_values = (each.new_empty(each.shape) for each in (query, keys.mT, values))
    return of_query, of_keys.mT, of_values
