"""What becomes of an index that was out of range: the CPU's error, with the op and its Python line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import CodeType

import jax
import numpy as np

from tpu_backend.lowering.bounds import IN_RANGE, BoundsCheck
from tpu_backend.runtime.signature import signature
from tpu_backend.runtime.user_line import line_of

Place = tuple[int, int, CodeType | None, int]  # entry of the segment, signature, code, offset in it

# By operator, of graphs of torch.compile: (number of a node) -> what it calls, and its line, if it has one.
nodes_of_graphs: dict[str, Callable[[int], tuple[str, str | None]]] = {}


def raise_range_error(
    out_of_range: jax.Array, bounds_checks: Sequence[BoundsCheck], places: Sequence[Place]
) -> None:
    """Wait for what a program's bounds checks found, and raise for the first index out of range.

    Raises what the lowering declared: IndexError or RuntimeError, with PyTorch's text.
    """
    values = np.asarray(out_of_range)
    if (values == IN_RANGE).all():
        return
    first = int(np.argmax(values != IN_RANGE))
    bounds_check = bounds_checks[first]
    _, number, code, lasti = next(place for place in places if place[0] == bounds_check.entry)
    call, line = signature(number), None
    what = call.described()
    if bounds_check.node is not None:
        operation, line = nodes_of_graphs[call.overload](bounds_check.node)
        what = f"{operation} of {what}"
    found = bounds_check.text.format(index=int(values[first]))
    raise bounds_check.error(f"{found}\n  in {what}\n  at {line or line_of(code, lasti)}")
