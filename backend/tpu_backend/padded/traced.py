"""An entry of a segment as JAX's own operations, and what two sizes of it have in common.

`Traced.skeleton` is all of it but its numbers; two entries with one skeleton differ in `Traced.numbers`
alone: shapes, slices, literals. A program of few primitives is easier to prove something of than a tape of
many operators.
"""

from __future__ import annotations

import enum
import hashlib
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jax.extend import core

from tpu_backend.lowering.bounds import Demand, collect_demands
from tpu_backend.lowering.few_numbers import in_ordinary_order
from tpu_backend.lowering.settings import recorded_settings
from tpu_backend.runtime.dtypes import stored_dtype
from tpu_backend.runtime.segment import Numbers, replay
from tpu_backend.runtime.signature import RuntimeArg, Signature, signature


@dataclass(frozen=True, eq=False)
class Traced:
    """One entry: it takes the values that it reads, its runtime numbers, then the offsets that are inputs."""

    jaxpr: core.ClosedJaxpr
    demands: tuple[Demand, ...]  # their offenders are its last outputs
    skeleton: str
    numbers: tuple[int | float, ...]
    switches: tuple[core.Literal, ...]  # what a tensor is filled with, True or False: the program's input

    @property
    def settings(self) -> list[int]:
        """The switches as they are here."""
        return [int(switch.val) for switch in self.switches]


class _Given(Numbers):
    """Runtime numbers one by one."""

    def __init__(self, numbers: Iterable[Any], offsets: Sequence[Any]):
        super().__init__(None, None, None, offsets)
        self._given = iter(numbers)

    def integer(self) -> Any:
        return next(self._given)

    def real(self, wide: bool) -> Any:
        return next(self._given)


def number_dtypes(entry: Signature) -> list[str]:
    """The dtypes of its runtime numbers, in the order in which a replay takes them."""
    real = "float64" if entry.wide else "float32"
    dtypes = [
        "int64" if leaf.is_integer else real
        for _, leaf in entry.named_leaves()
        if isinstance(leaf, RuntimeArg)
    ]
    return dtypes + ["int64", "int64"] * entry.random


def num_offsets(entry: Signature) -> int:
    return sum(tensor.has_offset for tensor in entry.tensors())


@lru_cache(maxsize=4096)
def trace(number: int, precision: int | None, offsets: tuple[tuple[int, bool], ...]) -> Traced:
    """The entry with this signature; of its offsets those marked are inputs.

    Raises NotPaddableError where it has no form that can be compared.
    """
    entry = signature(number)
    bases = [
        jax.ShapeDtypeStruct(tensor.base_dims, stored_dtype(tensor.base_dtype))
        for tensor in entry.tensors()
        if tensor.reads
    ]
    bases += [
        jax.ShapeDtypeStruct(output.layout_dims, stored_dtype(output.layout_dtype))
        for output in entry.outputs
        if output.partial and not output.skip
    ]
    numbers = [jax.ShapeDtypeStruct((), dtype) for dtype in number_dtypes(entry)]
    starts = [jax.ShapeDtypeStruct((), "int64") for _, is_input in offsets if is_input]
    demands: list[Demand] = []

    def function(*arguments: jax.Array) -> list[jax.Array]:
        values = dict(enumerate(arguments[: len(bases)]))
        inputs = iter(arguments[len(bases) + len(numbers) :])
        given = _Given(
            arguments[len(bases) : len(bases) + len(numbers)],
            [(offset, next(inputs)) if is_input else offset for offset, is_input in offsets],
        )
        with collect_demands() as collected, recorded_settings(precision), in_ordinary_order():
            results = replay(entry, iter(range(len(bases))), values, given)
        demands[:] = collected.made
        return [*results, *collected.offenders]

    with jax.enable_x64(True):
        jaxpr = jax.make_jaxpr(function)(*bases, *numbers, *starts)
    said = _Said(has_switches=entry.name == "fill.Scalar")
    said.closed(jaxpr)
    return Traced(jaxpr, tuple(demands), said.skeleton(), tuple(said.numbers), tuple(said.switches))


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
