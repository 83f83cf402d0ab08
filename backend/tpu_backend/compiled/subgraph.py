"""A sub-graph of a graph as a function that XLA's control flow and `jax.vmap` may call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from tpu_backend.lowering.bounds import BoundsCheck, collect_bounds_checks


class SubGraph:
    """(*arrays) -> (outputs of the graph, what its bounds checks found out of range, each an int64).

    A part of a program returns what its bounds checks found: values of an inner computation of XLA's must not
    be seen from outside. `closed_over` are its last inputs.
    """

    def __init__(self, graph: Any, symbols: Any, closed_over: Sequence[Any] = ()):
        self._graph, self._symbols, self._closed_over = graph, symbols, closed_over
        self.bounds_checks: list[BoundsCheck] = []

    def __call__(self, *arrays: Any) -> tuple[list[jax.Array], list[jax.Array]]:
        with collect_bounds_checks() as collected:
            outputs = self._graph.call([*arrays, *self._closed_over], self._symbols)
        self.bounds_checks = collected.made
        return outputs, collected.out_of_range

    def counted(self, *arrays: Any) -> int:
        """How many bounds checks it makes of such arrays."""
        jax.eval_shape(lambda: self(*arrays)[1])
        return len(self.bounds_checks)
