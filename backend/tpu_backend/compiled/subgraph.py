"""A sub-graph of a graph as a function that XLA's control flow and `jax.vmap` may call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from tpu_backend.lowering.bounds import Demand, collect_demands


class SubGraph:
    """(*arrays) -> (outputs of the graph, the offenders of its demands, each an int64).

    What a part of a program demands of its indices is among what it returns: values of an inner computation
    of XLA's must not be seen from outside. `closed_over` are its last inputs.
    """

    def __init__(self, graph: Any, symbols: Any, closed_over: Sequence[Any] = ()):
        self._graph, self._symbols, self._closed_over = graph, symbols, closed_over
        self.demands: list[Demand] = []

    def __call__(self, *arrays: Any) -> tuple[list[jax.Array], list[jax.Array]]:
        with collect_demands() as collected:
            outputs = self._graph.call([*arrays, *self._closed_over], self._symbols)
        self.demands = collected.made
        return outputs, collected.offenders

    def counted(self, *arrays: Any) -> int:
        """How many demands it makes of such arrays."""
        jax.eval_shape(lambda: self(*arrays)[1])
        return len(self.demands)
