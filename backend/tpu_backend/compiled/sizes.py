"""What a graph with symbolic sizes does about them: pads where that is safe, and says when they are many."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from torch import fx

from tpu_backend.buckets import bucket
from tpu_backend.compiled.graph import Graph
from tpu_backend.compiled.padding import paddable_sizes, padded, place_of

log = logging.getLogger("tpu_backend.compile")

MANY = 8
"""So many programs of one graph are nothing to speak of."""


class Sizes:
    """The sizes that one graph is called with; `wanted` are the nodes that it returns."""

    def __init__(self, name: str, graph: Graph, wanted: Sequence[fx.Node], may_pad: bool):
        self.name, self.graph = name, graph
        self.outputs = [node.meta["val"] for node in wanted]
        symbols = {symbol for where in graph.symbols for symbol, _ in where}
        self.paddable = paddable_sizes(graph.nodes) if may_pad and symbols else set()
        self.is_dynamic = bool(symbols)
        self._seen: set[tuple[tuple[sympy.Symbol, int], ...]] = set()
        self._warned = False

    def call(self, run: Callable[[Sequence[Any]], Sequence[torch.Tensor]], given: Sequence[Any]) -> Any:
        """The results of `run` for these inputs, where it may have been run on larger ones."""
        if not self.is_dynamic:
            return run(given)
        sizes = self.graph.bind(given)
        larger = {symbol: bucket(size) for symbol, size in sizes.items() if symbol in self.paddable and size}
        self._count(sizes, larger)
        if all(sizes[symbol] == size for symbol, size in larger.items()):
            return run(given)
        inputs = [
            self._padded(node.meta["val"], value, larger)
            for node, value in zip(self.graph.placeholders, given, strict=True)
        ]
        # Cut before and after: what pads and what uses the results has the true size in its program.
        torch.tpu.flush()  # type: ignore[attr-defined]
        results = run(inputs)
        torch.tpu.flush()  # type: ignore[attr-defined]
        return [
            self._cropped(value, result, sizes) for value, result in zip(self.outputs, results, strict=True)
        ]

    def _padded(self, traced: Any, value: Any, larger: dict[sympy.Symbol, int]) -> Any:
        if isinstance(traced, torch.SymInt):
            return larger.get(traced.node.expr, value)
        if isinstance(traced, torch.Tensor):
            for symbol, size in larger.items():
                dim = place_of(traced, symbol)
                value = value if dim is None else padded(value, dim, size)
        return value

    def _cropped(self, traced: torch.Tensor, result: torch.Tensor, sizes: dict[sympy.Symbol, int]) -> Any:
        for symbol in self.paddable:
            dim = place_of(traced, symbol)
            result = result if dim is None else result.narrow(dim, 0, sizes[symbol])
        return result.contiguous()

    def _count(self, sizes: dict[sympy.Symbol, int], larger: dict[sympy.Symbol, int]) -> None:
        self._seen.add(tuple((sizes | larger).items()))
        if len(self._seen) == MANY + 1 and not self._warned:
            self._warned = True
            exact = [f"{self._described(each)} is {sizes[each]} now" for each in sizes.keys() - larger.keys()]
            log.warning(
                "torch.compile: the %s graph has met %d sets of sizes, each a program: %s; pad what varies",
                self.name,
                len(self._seen),
                ", ".join(exact),
            )

    def _described(self, symbol: sympy.Symbol) -> str:
        """A size as Dynamo's user would write it: `x.shape[0]`."""
        for node in self.graph.placeholders:
            value = node.meta["val"]
            for size in [value] if isinstance(value, torch.SymInt) else getattr(value, "shape", ()):
                if isinstance(size, torch.SymInt) and size.node.expr == symbol:
                    source = size.node.shape_env.var_to_sources[symbol][0].name
                    return re.sub(r"L\['(\w+)'\]", r"\1", source).replace(".size()", ".shape")
        return str(symbol)
