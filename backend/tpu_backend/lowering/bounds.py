"""Demands on indices, counts and probabilities, which only the device knows: lowerings make them, whoever
waits reads.

``require_in_range`` adds one number to the program that is being built: an index that is out of range, or
``IN_RANGE``. The stream keeps these numbers of every program, and whoever waits for the device reads them
and raises what the CPU would have raised (see runtime/range_errors.py). A program whose indices are wrong
still runs: XLA clamps reads and drops writes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp

IN_RANGE = -(2**63)


@dataclass(frozen=True)
class Demand:
    """What is raised when an index is out of range; ``{index}`` in the text stands for it."""

    error: type[Exception]
    text: str
    entry: int  # which entry of the segment made it
    node: int | None = None  # and which of its nodes, where that is a graph of torch.compile


@dataclass
class Demands:
    """Those of one program, in order, with the 0-d int64 array of each."""

    made: list[Demand] = field(default_factory=list)
    offenders: list[jax.Array] = field(default_factory=list)
    entry: int = 0  # the entry that is being lowered
    node: int | None = None


class _Collecting(threading.local):
    demands: Demands | None = None


_collecting = _Collecting()


@contextmanager
def collect_demands() -> Iterator[Demands]:
    """Collect what lowerings demand while a program is traced on this thread."""
    outer, _collecting.demands = _collecting.demands, Demands()
    try:
        yield _collecting.demands
    finally:
        _collecting.demands = outer


@contextmanager
def lowering_node(place: int) -> Iterator[None]:
    """In here what is demanded is demanded by this node of a graph."""
    demands = _collecting.demands
    if demands is None:
        yield
        return
    outer, demands.node = demands.node, place
    try:
        yield
    finally:
        demands.node = outer


def require_in_range(
    index: jax.Array, low: int, high: int, error: type[Exception], text: str, allowed: int | None = None
) -> None:
    """Demand ``low <= index < high`` (or ``index == allowed``) of every element of an integer array."""
    demands = _collecting.demands
    if demands is None or index.size == 0:
        return
    wrong = (index < low) | (index >= high)
    if allowed is not None:
        wrong &= index != allowed
    demands.offenders.append(jnp.max(jnp.where(wrong, index.astype(jnp.int64), IN_RANGE)))
    demands.made.append(Demand(error, text, demands.entry, demands.node))


def require_of_part(made: Sequence[Demand], offenders: Sequence[jax.Array]) -> None:
    """Demand of the program what a part of it demanded, collected apart: a branch, or the body of a loop."""
    demands = _collecting.demands
    if demands is not None:
        demands.made += [replace(demand, entry=demands.entry, node=demands.node) for demand in made]
        demands.offenders += offenders


def require_all(holds: jax.Array, error: type[Exception], text: str) -> None:
    """Demand that every element of a boolean array is True."""
    require_in_range(holds.astype(jnp.int32), 1, 2, error, text)


def nonzero_divisor(dividend: jax.Array, divisor: jax.Array) -> jax.Array:
    """The integer array that divides, with 1 in place of 0; demands that none is 0, in the CPU's words.

    XLA:CPU ends the process where it folds 0 / 0 (`(x - x) % (x - x)`). A number that is 0 gets no
    further than csrc/aten/division.cpp.
    """
    if dividend.size:
        require_all(divisor != 0, RuntimeError, "ZeroDivisionError")
    return jnp.where(divisor == 0, jnp.ones((), divisor.dtype), divisor)
