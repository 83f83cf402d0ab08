"""Bounds checks of indices, counts and probabilities, which only the device knows.

Lowerings make them; whoever waits for the program reads what they found.

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
class BoundsCheck:
    """What is raised when an index is out of range; ``{index}`` in the text stands for it."""

    error: type[Exception]
    text: str
    entry: int  # which entry of the segment made it
    node: int | None = None  # and which of its nodes, where that is a graph of torch.compile


@dataclass
class BoundsChecks:
    """Those of one program, in order, with the 0-d int64 array of each."""

    made: list[BoundsCheck] = field(default_factory=list)
    out_of_range: list[jax.Array] = field(default_factory=list)
    entry: int = 0  # the entry that is being lowered
    node: int | None = None


class _Collecting(threading.local):
    bounds_checks: BoundsChecks | None = None


_collecting = _Collecting()


@contextmanager
def collect_bounds_checks() -> Iterator[BoundsChecks]:
    """Collect the bounds checks of lowerings while a program is traced on this thread."""
    outer, _collecting.bounds_checks = _collecting.bounds_checks, BoundsChecks()
    try:
        yield _collecting.bounds_checks
    finally:
        _collecting.bounds_checks = outer


@contextmanager
def lowering_node(place: int) -> Iterator[None]:
    """In here bounds checks are made by this node of a graph."""
    bounds_checks = _collecting.bounds_checks
    if bounds_checks is None:
        yield
        return
    outer, bounds_checks.node = bounds_checks.node, place
    try:
        yield
    finally:
        bounds_checks.node = outer


def require_in_range(
    index: jax.Array, low: int, high: int, error: type[Exception], text: str, allowed: int | None = None
) -> None:
    """BoundsCheck ``low <= index < high`` (or ``index == allowed``) of every element of an integer array."""
    bounds_checks = _collecting.bounds_checks
    if bounds_checks is None or index.size == 0:
        return
    wrong = (index < low) | (index >= high)
    if allowed is not None:
        wrong &= index != allowed
    bounds_checks.out_of_range.append(jnp.max(jnp.where(wrong, index.astype(jnp.int64), IN_RANGE)))
    bounds_checks.made.append(BoundsCheck(error, text, bounds_checks.entry, bounds_checks.node))


def require_of_part(made: Sequence[BoundsCheck], out_of_range: Sequence[jax.Array]) -> None:
    """Add the bounds checks of a part of a program, collected apart: a branch, or the body of a loop."""
    bounds_checks = _collecting.bounds_checks
    if bounds_checks is not None:
        bounds_checks.made += [
            replace(bounds_check, entry=bounds_checks.entry, node=bounds_checks.node) for bounds_check in made
        ]
        bounds_checks.out_of_range += out_of_range


def require_all(holds: jax.Array, error: type[Exception], text: str) -> None:
    """BoundsCheck that every element of a boolean array is True."""
    require_in_range(holds.astype(jnp.int32), 1, 2, error, text)


_IN_C = {
    "int8": "int8_t",
    "uint8": "uint8_t",
    "int16": "int16_t",
    "int32": "int",
    "int64": "int64_t",
    "float16": "c10::Half",
    "bfloat16": "c10::BFloat16",
    "float32": "float",
    "float64": "double",
    "complex64": "c10::complex<float>",
}


def require_fits(number: jax.Array, dtype: jnp.dtype) -> None:
    """BoundsCheck of a number in a tensor that becomes one of `dtype`, in the words of PyTorch's conversion.

    Of numbers in Python the recorder looks itself (``fits=`` of a lowering).
    """
    number = jnp.asarray(number)
    if str(dtype) not in _IN_C or number.dtype in (dtype, jnp.bool_):
        return
    parts = [number]
    fits = jnp.asarray(True)
    if jnp.iscomplexobj(number):
        parts = [number.real, number.imag]
        if not jnp.issubdtype(dtype, jnp.complexfloating):
            parts, fits = parts[:1], number.imag == 0
    for part in parts:
        fits &= _part_fits(part, dtype)
    require_all(fits, RuntimeError, f"value cannot be converted to type {_IN_C[str(dtype)]} without overflow")


def _part_fits(part: jax.Array, dtype: jnp.dtype) -> jax.Array:
    is_integer = jnp.issubdtype(part.dtype, jnp.integer)
    wide = part.astype(jnp.int64 if is_integer else jnp.float64)
    if not jnp.issubdtype(dtype, jnp.integer):
        return ~jnp.isfinite(wide) | (jnp.abs(wide) <= float(jnp.finfo(dtype).max))
    limits = jnp.iinfo(dtype)
    wraps = is_integer and limits.min == 0  # numbers below 0 do, into unsigned ones; floats do not
    return (wide >= (-int(limits.max) if wraps else limits.min)) & (wide <= limits.max)


def nonzero_divisor(dividend: jax.Array, divisor: jax.Array) -> jax.Array:
    """The integer array that divides, with 1 in place of 0; checks that none is 0, in the CPU's words.

    XLA:CPU ends the process where it folds 0 / 0 (`(x - x) % (x - x)`). A number that is 0 gets no
    further than csrc/aten/division.cpp.
    """
    if dividend.size:
        require_all(divisor != 0, RuntimeError, "ZeroDivisionError")
    return jnp.where(divisor == 0, jnp.ones((), divisor.dtype), divisor)
