"""The recorded operators behind collectives: `torch.ops.tpu_collective`.

Each takes the rank's own tensor and the ranks of the group, and returns a new tensor. Outside of a region
each is a program of its own; in a region it is part of the segment.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.library import Library

from tpu_backend.lowering.collectives import NAMESPACE
from tpu_backend.untraced import untraced


@cache
def register() -> Library:
    """Define them, for the life of the process.  Idempotent."""
    library = Library(NAMESPACE, "FRAGMENT")
    for schema, infer in _OPERATORS.items():
        library.define(schema)
        library.impl(schema.partition("(")[0], untraced(infer), "Meta")
    return library


def _like(self: Tensor, *_: object) -> Tensor:
    return torch.empty(self.shape, dtype=self.dtype, device="meta")


def _gathered(self: Tensor, ranks: list[int]) -> Tensor:
    first, *rest = self.shape or (1,)
    return torch.empty((len(ranks) * first, *rest), dtype=self.dtype, device="meta")


def _scattered(self: Tensor, reduce: str, ranks: list[int]) -> Tensor:
    first, *rest = self.shape
    return torch.empty((first // len(ranks), *rest), dtype=self.dtype, device="meta")


_OPERATORS: dict[str, Callable[..., Tensor]] = {
    "all_reduce(Tensor self, str reduce, int[] ranks) -> Tensor": _like,
    "all_gather(Tensor self, int[] ranks) -> Tensor": _gathered,
    "reduce_scatter(Tensor self, str reduce, int[] ranks) -> Tensor": _scattered,
    "all_to_all(Tensor self, int[] ranks) -> Tensor": _like,
    "broadcast(Tensor self, int root, int[] ranks) -> Tensor": _like,
    "send_receive(Tensor self, int source, int[] ranks) -> Tensor": _like,
}
