"""A graph in parts, where something in it has no XLA form: a custom operator in Python, a tensor on the CPU.

Parts are runs of nodes in the graph's own order, so that random numbers are drawn and side effects happen in
the order of eager mode. Those with an XLA form are compiled, one entry of the op stream each; those between
them run operation by operation.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import sympy
import torch
from torch import fx

Boxed = Callable[[list[Any]], Sequence[Any]]
"""What AOTAutograd calls: the inputs come as one list, which is emptied so that they can be freed."""


class OperationByOperation:
    """A graph as it is."""

    def __init__(self, module: fx.GraphModule):
        self.module = module
        self._boxed_call = True

    def __call__(self, inputs: list[Any]) -> Any:
        given = tuple(inputs)
        inputs.clear()
        return self.module(*given)


@dataclass
class _Part:
    nodes: list[fx.Node]
    inputs: list[fx.Node]
    outputs: list[fx.Node]
    run: Boxed
    last_used: list[fx.Node]
    """Values that no later part needs."""


class Split:
    """A graph as a function from its inputs to its outputs, computed part by part.

    `problems` are the nodes without an XLA form, and why; `compiled` makes a function of a graph without any.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        problems: Mapping[fx.Node, str],
        compiled: Callable[[fx.GraphModule], Boxed],
    ):
        self._boxed_call = True
        self.problems = problems
        self.placeholders = list(module.graph.find_nodes(op="placeholder"))
        (self.output,) = module.graph.find_nodes(op="output")
        self.parts: list[_Part] = []
        self.num_compiled = 0
        needed = set(self.output.all_input_nodes)
        for is_ours, nodes in reversed(_runs(module, problems)):
            inputs = self._inputs(nodes)
            outputs = [node for node in nodes if node in needed]
            last_used = [node for node in inputs if node not in needed]
            needed.update(inputs)
            part = _module(module, nodes, inputs, outputs)
            run = compiled(part) if is_ours else OperationByOperation(part)
            self.num_compiled += is_ours
            self.parts.insert(0, _Part(nodes, inputs, outputs, run, last_used))

    def __call__(self, inputs: list[Any]) -> list[Any]:
        values: dict[fx.Node, Any] = dict(zip(self.placeholders, inputs, strict=True))
        inputs.clear()
        for part in self.parts:
            given = [values[node] for node in part.inputs]
            for node in part.last_used:
                del values[node]
            values.update(zip(part.outputs, part.run(given), strict=True))
        return [values[each] if isinstance(each, fx.Node) else each for each in self.output.args[0]]

    def described(self) -> str:
        """One line: into how much it is split, and around what."""
        counts = Counter(why for part in self.parts for why in map(self.problems.get, part.nodes) if why)
        reasons = "; ".join(f"{why} ({count}x)" if count > 1 else why for why, count in counts.items())
        return (
            f"is split into {self.num_compiled} compiled parts, around what runs as in eager mode: {reasons}"
        )

    def _inputs(self, nodes: Sequence[fx.Node]) -> list[fx.Node]:
        """What these nodes read, and the placeholders that say what their symbolic sizes are."""
        inside = set(nodes)
        outside = {each: None for node in nodes for each in node.all_input_nodes if each not in inside}
        symbols = set().union(*(_symbols(node) for node in (*nodes, *outside)))
        for node in self.placeholders:
            if symbols & (found := _own_symbols(node)):
                outside[node] = None
                symbols -= found
        return [node for node in outside if node.op != "get_attr"]


def _runs(module: fx.GraphModule, problems: Mapping[fx.Node, str]) -> list[tuple[bool, list[fx.Node]]]:
    """The computing nodes in runs: (whether they have an XLA form, nodes)."""
    runs: list[tuple[bool, list[fx.Node]]] = []
    run_of: dict[fx.Node, list[fx.Node]] = {}
    for node in module.graph.nodes:
        if node.op in ("placeholder", "output", "get_attr"):
            continue
        if node.target is operator.getitem and node.args[0] in run_of:  # one of many results stays with them
            run_of[node] = run_of[node.args[0]]
        else:
            is_ours = node not in problems
            if not runs or runs[-1][0] != is_ours:
                runs.append((is_ours, []))
            run_of[node] = runs[-1][1]
        run_of[node].append(node)
    return runs


def _module(
    whole: fx.GraphModule, nodes: Sequence[fx.Node], inputs: Sequence[fx.Node], outputs: Sequence[fx.Node]
) -> fx.GraphModule:
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in nodes:
        for each in node.all_input_nodes:
            if each.op == "get_attr" and each not in copies:
                copies[each] = graph.node_copy(each)
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output([copies[node] for node in outputs])
    return fx.GraphModule(whole, graph)


def _symbols(node: fx.Node) -> set[sympy.Symbol]:
    """The symbolic sizes that what a node makes has."""
    found: set[sympy.Symbol] = set()
    for value in jax.tree.leaves(node.meta.get("val")):
        sizes = [*value.shape, *value.stride()] if isinstance(value, torch.Tensor) else [value]
        for size in sizes:
            if isinstance(size, (torch.SymInt, torch.SymFloat, torch.SymBool)):
                found |= size.node.expr.free_symbols
    return found


def _own_symbols(node: fx.Node) -> set[sympy.Symbol]:
    """Those that its sizes, or it, are by themselves."""
    value = node.meta.get("val")
    sizes = list(value.shape) if isinstance(value, torch.Tensor) else [value]
    return {
        size.node.expr
        for size in sizes
        if isinstance(size, torch.SymInt) and isinstance(size.node.expr, sympy.Symbol)
    }
