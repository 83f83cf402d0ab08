"""An entry of a segment as JAX's own operations, and what two sizes of it have in common.

`Traced.skeleton` is all of it but its numbers; two entries with one skeleton differ in `Traced.numbers`
alone: shapes, slices, literals. A program of few primitives is easier to prove something of than a tape of
many operators.
"""

from __future__ import annotations

import enum
import hashlib
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from jax.extend import core

from tpu_backend.lowering.bounds import BoundsCheck
from tpu_backend.lowering.few_numbers import in_ordinary_order
from tpu_backend.runtime.segment import trace_entry
from tpu_backend.runtime.signature import signature


@dataclass(frozen=True, eq=False)
class Traced:
    """One entry: it takes the values that it reads, its runtime numbers, then the offsets that are inputs."""

    jaxpr: core.ClosedJaxpr
    bounds_checks: tuple[BoundsCheck, ...]  # what was out of range are its last outputs
    skeleton: str
    numbers: tuple[int | float, ...]
    switches: tuple[core.Literal, ...]  # what a tensor is filled with, True or False: the program's input

    @property
    def settings(self) -> list[int]:
        """The switches as they are here."""
        return [int(switch.val) for switch in self.switches]


@lru_cache(maxsize=4096)
def trace(number: int, precision: int | None, offsets: tuple[tuple[int, bool], ...]) -> Traced:
    """The entry with this signature; of its offsets those marked are inputs.

    Raises NotPaddableError where it has no form that can be compared.
    """
    entry = signature(number)
    with in_ordinary_order():
        traced = trace_entry(entry, offsets, precision)
    said = _Said(has_switches=entry.name == "fill.Scalar")
    said.closed(traced.jaxpr)
    return Traced(
        traced.jaxpr, traced.bounds_checks, said.skeleton(), tuple(said.numbers), tuple(said.switches)
    )


class _Said:
    """A program taken apart into its numbers and all the rest."""

    def __init__(self, has_switches: bool = False) -> None:
        self.numbers: list[int | float] = []
        self.switches: list[core.Literal] = []
        self._has_switches = has_switches
        self._digest = hashlib.sha256()

    def skeleton(self) -> str:
        return self._digest.hexdigest()

    def _say(self, *words: Any) -> None:
        self._digest.update(repr(words).encode())

    def closed(self, jaxpr: core.ClosedJaxpr) -> None:
        for constant in jaxpr.consts:
            self._constant(constant)
        self._jaxpr(jaxpr.jaxpr)

    def _jaxpr(self, jaxpr: core.Jaxpr) -> None:
        places: dict[Any, int] = {}
        for variable in (*jaxpr.constvars, *jaxpr.invars):
            self._made(variable, places)
        for equation in jaxpr.eqns:
            self._say(equation.primitive.name)
            for operand in equation.invars:
                self._read(operand, places)
            for variable in equation.outvars:
                self._made(variable, places)
            self.parameters(equation.params)
        for operand in jaxpr.outvars:
            self._read(operand, places)

    def parameters(self, params: Mapping[str, Any]) -> None:
        for name in sorted(params):
            self._say(name)
            self._parameter(params[name])

    def _made(self, variable: Any, places: dict[Any, int]) -> None:
        places[variable] = len(places)
        self._say(str(variable.aval.dtype), len(variable.aval.shape), variable.aval.weak_type)
        self.numbers += variable.aval.shape

    def _read(self, operand: Any, places: dict[Any, int]) -> None:
        if not isinstance(operand, core.Literal):
            self._say(places[operand])
            return
        aval: Any = operand.aval
        self._say("literal", str(aval.dtype), aval.weak_type)
        if self._has_switches and aval.dtype == bool:
            self.switches.append(operand)
        else:
            self._constant(operand.val)

    def _constant(self, value: Any) -> None:
        array = np.asarray(value)
        if array.ndim == 0 and array.dtype.kind in "iuf" and math.isfinite(number := array.item()):
            self.numbers.append(number)
        else:
            self._say(array.shape, str(array.dtype), hashlib.sha256(array.tobytes()).hexdigest())

    def _parameter(self, value: Any) -> None:
        if isinstance(value, core.ClosedJaxpr):
            self.closed(value)
        elif isinstance(value, core.Jaxpr):
            self._jaxpr(value)
        elif isinstance(value, bool) or value is None or isinstance(value, (str, enum.Enum, np.dtype, type)):
            self._say(value)
        elif isinstance(value, (int, np.integer)):
            self.numbers.append(int(value))
        elif isinstance(value, (tuple, list)):
            self._say(type(value).__name__, len(value))
            for each in value:
                self._parameter(each)
        elif isinstance(value, dict):
            self._say(sorted(value))
            for name in sorted(value):
                self._parameter(value[name])
        elif hasattr(value, "__dataclass_fields__"):
            self._say(type(value).__name__)
            for name in value.__dataclass_fields__:
                self._parameter(getattr(value, name))
        elif callable(value):  # a rule for derivatives, which nobody asks for here
            self._say("function")
        else:
            self._say(type(value).__name__, str(value))


def parameters_of(equation: Any, without: Collection[str] = ()) -> tuple[str, tuple[int | float, ...]]:
    """All that an equation is told beside its operands, comparable."""
    said = _Said()
    said.parameters({name: value for name, value in equation.params.items() if name not in without})
    return said.skeleton(), tuple(said.numbers)
