"""Says when a graph with symbolic sizes has become many programs."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import Any

import sympy
import torch

from tpu_backend.compiled.graph import Graph
from tpu_backend.runtime import compile_log

log = logging.getLogger("tpu_backend.compile")

MANY = 8
"""So many programs of one graph are nothing to speak of."""


class Sizes:
    """The sizes that one graph is called with; `operator` is its name in the dispatcher."""

    def __init__(self, name: str, graph: Graph, operator: str):
        self.name, self.graph, self.operator = name, graph, operator
        self.are_dynamic = any(graph.symbols)
        self._seen: set[tuple[int, ...]] = set()
        self._warned = False

    def note(self, given: Sequence[Any]) -> None:
        """It is about to be called with these inputs."""
        if not self.are_dynamic or self._warned:
            return
        sizes = self.graph.bind(given)
        if (values := tuple(sizes.values())) in self._seen:
            return
        self._seen.add(values)
        if len(self._seen) <= MANY or 4 * self._num_programs() < 3 * len(self._seen):  # few serve all
            return
        self._warned = True
        changing = [
            f"{self._described(symbol)} is {size} now"
            for (symbol, size), met in zip(sizes.items(), zip(*self._seen, strict=True), strict=True)
            if len(set(met)) > 1
        ]
        log.warning(
            "torch.compile: the %s graph has met %d sets of sizes, each a program: %s; pad what varies",
            self.name,
            len(self._seen),
            ", ".join(changing),
        )

    def _num_programs(self) -> int:
        """How many of the last compilations hold this graph; that for the present inputs is still to come."""
        return sum(self.operator in each.operations for each in compile_log.compilations())

    def _described(self, symbol: sympy.Symbol) -> str:
        """A size as Dynamo's user would write it: `x.shape[0]`."""
        for node in self.graph.placeholders:
            value = node.meta["val"]
            for size in [value] if isinstance(value, torch.SymInt) else getattr(value, "shape", ()):
                if isinstance(size, torch.SymInt) and size.node.expr == symbol:
                    source = size.node.shape_env.var_to_sources[symbol][0].name
                    return re.sub(r"L\['(\w+)'\]", r"\1", source).replace(".size()", ".shape")
        return str(symbol)
