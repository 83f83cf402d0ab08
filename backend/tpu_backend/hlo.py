"""Reads the collectives out of an optimized program's text (`jax.stages.Compiled.as_text`)."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

_KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.-]+) \(.*\{$")
_COLLECTIVE = re.compile(rf"^\s+(?:ROOT )?%?[\w.-]+ = (.+?) ({'|'.join(_KINDS)})(-start)?\(")
_SHAPE = re.compile(r"([a-z]\w*)\[([\d,]*)\]")
_BITS = re.compile(r"\d+")


@dataclass(frozen=True)
class Collective:
    """One that the program launches."""

    kind: str  # all-gather, all-reduce, reduce-scatter, all-to-all, collective-permute, all-reduce-scatter
    results: tuple[tuple[str, tuple[int, ...]], ...]  # dtype and dims of each
    is_async: bool  # other work may run meanwhile
    computation: str

    @property
    def num_bytes(self) -> int:
        """Of all results."""
        return sum(_itemsize(dtype) * math.prod(dims) for dtype, dims in self.results)


def collectives(text: str) -> list[Collective]:
    """All of a program, in the order of its text.

    An all-reduce inside a fusion `all-reduce-scatter` is a reduce-scatter: each chip keeps its part. A fusion
    that carries a step of a collective (`async_collective_fusion`) names it once a step: those are async.
    """
    found = []
    computation = ""
    for line in text.splitlines():
        if (begins := _COMPUTATION.match(line)) is not None:
            computation = begins[1]
        if (match := _COLLECTIVE.match(line)) is None:
            continue
        results, kind, start = match.groups()
        if kind == "all-reduce" and "all-reduce-scatter" in computation:
            kind = "all-reduce-scatter"
        shapes = tuple(
            (dtype, tuple(map(int, filter(None, dims.split(","))))) for dtype, dims in _SHAPE.findall(results)
        )
        is_async = start is not None or "async_collective" in computation or "async_collective_name" in line
        found.append(Collective(kind, shapes, is_async, computation))
    return found


def _itemsize(dtype: str) -> int:
    bits = _BITS.search(dtype)
    return 1 if bits is None else max(int(bits[0]) // 8, 1)
