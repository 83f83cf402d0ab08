"""What becomes of an index that was out of range: the CPU's error, with the op and its Python line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import CodeType

import jax
import numpy as np

from tpu_backend.lowering.bounds import IN_RANGE, Demand
from tpu_backend.runtime.signature import signature
from tpu_backend.runtime.user_line import line_of

Place = tuple[int, int, CodeType | None, int]  # entry of the segment, signature, code, offset in it

# By operator, of graphs of torch.compile: (number of a node) -> what it calls, and its line, if it has one.
nodes_of_graphs: dict[str, Callable[[int], tuple[str, str | None]]] = {}


def raise_range_error(offenders: jax.Array, demands: Sequence[Demand], places: Sequence[Place]) -> None:
    """Wait for a program's offenders and raise for the first one; nothing where all indices are in range.

    Raises what the lowering declared: IndexError or RuntimeError, with PyTorch's text.
    """
    values = np.asarray(offenders)
    if (values == IN_RANGE).all():
        return
    first = int(np.argmax(values != IN_RANGE))
    demand = demands[first]
    _, number, code, lasti = next(place for place in places if place[0] == demand.entry)
    call, line = signature(number), None
    what = call.described()
    if demand.node is not None:
        operation, line = nodes_of_graphs[call.overload](demand.node)
        what = f"{operation} of {what}"
    raise demand.error(
        f"{demand.text.format(index=int(values[first]))}\n  in {what}\n  at {line or line_of(code, lasti)}"
    )
