"""Segments that are one program but for a size T: recognised, proven, and described at a bucket.

Nobody names T. Two tapes that differ in numbers alone, all of which are linear in one of them, are a
family; a third tape belongs to it where each of its numbers is what the family says of its T. Numbers are
compared in JAX's operations (`traced.py`), each entry's lowering traced at each size: a lowering that takes
another way for another size is another program, and no part of the family.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from tpu_backend.lowering.bounds import BoundsCheck
from tpu_backend.padded.dims import Dim, Examples, Linear, NotPaddableError, Number, grown, is_grown, size_at
from tpu_backend.padded.rules import Lengthened, Padded
from tpu_backend.padded.traced import Traced, trace
from tpu_backend.runtime.dtypes import stored_dtype
from tpu_backend.runtime.lists import shares_buffers
from tpu_backend.runtime.segment import num_offsets, number_dtypes
from tpu_backend.runtime.signature import Signature, entries, summaries

log = logging.getLogger("tpu_backend.compile")

Description = dict[str, Any]


def outline(description: Description) -> tuple[Any, ...]:
    """What two segments that are alike but for a size have in common, seen from afar."""
    words = [
        (entry.overload, precision, tuple(links), tuple(len(dims) for _, dims in entry.layouts))
        for entry, precision, links in summaries(description["tape"])
    ]
    layouts = [(dtype, len(dims)) for dtype, dims in description["input_layouts"]]
    rest = ("inputs", "outputs", "donated")
    counts = ("num_floats", "num_doubles", "num_integers")
    return (
        tuple(words),
        tuple(layouts),
        *(tuple(description[name]) for name in rest),
        *(description[name] for name in counts),
        len(description["offsets"]),
        description["device"],
    )


def sizes_of(description: Description) -> list[int]:
    """The sizes of the tensors that a segment reads, then of those that its operations make."""
    read = [size for _, dims in description["input_layouts"] for size in dims]
    tape = summaries(description["tape"])
    return read + [size for entry, _, _ in tape for _, dims in entry.layouts for size in dims]


@dataclass(frozen=True)
class _Step:
    """One entry: its forms at both sizes."""

    entry: Signature
    links: tuple[int, ...]
    first: Traced
    second: Traced
    numbers: tuple[Number | float, ...]  # of the form, solved
    inputs: tuple[bool, ...]  # which offsets are given at run time


def _forms(
    description: Description, inputs: Sequence[bool]
) -> Iterator[tuple[Signature, Any, int | None, Any]]:
    """Each entry with its links, its precision, and its offsets, each with whether it is an input."""
    offsets = iter(zip(description["offsets"], inputs, strict=True))
    for entry, precision, links in entries(description["tape"]):
        yield entry, links, precision, tuple(itertools.islice(offsets, num_offsets(entry)))


class Family:
    """Segments like these two. Raises NotPaddableError where they are no family."""

    def __init__(self, first: Description, second: Description):
        self.description = first
        self._offsets = [
            None if offset != other else offset
            for offset, other in zip(first["offsets"], second["offsets"], strict=True)
        ]
        sizes = list(zip(sizes_of(first), sizes_of(second), strict=True))
        growing = [pair for pair in sizes if pair[0] != pair[1]]
        if not growing:
            raise NotPaddableError("nothing grows")
        self._place = sizes.index(min(growing, key=lambda pair: abs(pair[1] - pair[0])))
        self.examples = Examples(*sizes[self._place])
        self.input_dims = [
            tuple(grown(self.examples.solve(*pair)) for pair in zip(dims, others, strict=True))
            for (_, dims), (_, others) in zip(first["input_layouts"], second["input_layouts"], strict=True)
        ]
        if any(is_grown(dims) for local, dims in self._inputs() if local in first["donated"]):
            raise NotPaddableError("a tensor that grows is written in place")
        self.steps = list(self._steps(first, second))

    def _inputs(self) -> Iterator[tuple[int, tuple[Dim, ...]]]:
        return zip(self.description["inputs"], self.input_dims, strict=True)

    @property
    def _given(self) -> list[bool]:
        return [offset is None for offset in self._offsets]

    def _steps(self, first: Description, second: Description) -> Iterator[_Step]:
        solved: dict[tuple[Traced, Traced], tuple[Number | float, ...]] = {}
        for one, other in zip(_forms(first, self._given), _forms(second, self._given), strict=True):
            entry, links, precision, offsets = one
            if shares_buffers(entry, links):
                raise NotPaddableError(f"{entry.overload} writes several parts of one buffer")
            forms = trace(entry.number, precision, offsets), trace(other[0].number, other[2], other[3])
            if forms[0].skeleton != forms[1].skeleton:
                raise NotPaddableError(f"{entry.overload} is computed in another way")
            if forms not in solved:
                pairs = zip(forms[0].numbers, forms[1].numbers, strict=True)
                solved[forms] = tuple(self._solve(*pair) for pair in pairs)
            inputs = tuple(is_input for _, is_input in offsets)
            yield _Step(entry, tuple(links), *forms, solved[forms], inputs)

    def _solve(self, first: float, second: float) -> Number | float:
        if first == second:
            return first
        if int(first) != first or int(second) != second:
            raise NotPaddableError(f"{first} and {second} are no whole numbers")
        return self.examples.solve(int(first), int(second))

    def size_of(self, description: Description) -> int | None:
        """The size T of a segment of this family; None where it is none."""
        layouts = description["input_layouts"]
        size = sizes_of(description)[self._place]
        first = self.description["input_layouts"]
        for (dtype, dims), (other, _), known in zip(layouts, first, self.input_dims, strict=True):
            if dtype != other or tuple(dims) != tuple(size_at(dim, size) for dim in known):
                return None
        for offset, known_offset in zip(description["offsets"], self._offsets, strict=True):
            if known_offset is not None and offset != known_offset:
                return None
        compared: set[tuple[Traced, Traced, Traced]] = set()
        for step, form in zip(self.steps, self._traced(description), strict=True):
            if (step.first, step.second, form) in compared:
                continue
            if form.skeleton != step.first.skeleton or len(form.bounds_checks) != len(
                step.first.bounds_checks
            ):
                log.debug("not padded: %s is computed in another way", step.entry.described())
                return None
            for number, there in zip(step.numbers, form.numbers, strict=True):
                if (number.at(size) if isinstance(number, Linear) else number) != there:
                    log.debug("not padded: %s has a number that does not fit", step.entry.described())
                    return None
            compared.add((step.first, step.second, form))
        return size

    def _traced(self, description: Description) -> Iterator[Traced]:
        for entry, _, precision, offsets in _forms(description, self._given):
            yield trace(entry.number, precision, offsets)

    def bounds_checks_of(self, description: Description) -> tuple[BoundsCheck, ...]:
        """The bounds checks of a segment of this family."""
        return tuple(
            BoundsCheck(bounds_check.error, bounds_check.text, place, bounds_check.node)
            for place, form in enumerate(self._traced(description))
            for bounds_check in form.bounds_checks
        )

    def numbers_of(self, description: Description, size: int) -> list[int]:
        """The last argument of the program: T, the offsets that differ, and the switches."""
        given = zip(description["offsets"], self._given, strict=True)
        offsets = [offset for offset, is_given in given if is_given]
        return [size, *offsets, *(each for form in self._traced(description) for each in form.settings)]

    @cached_property
    def cost(self) -> float:
        """Elements that are made for one more of T."""
        more = sum(
            math.prod(other.aval.shape) - math.prod(variable.aval.shape)
            for step in self.steps
            for variable, other in zip(
                step.first.jaxpr.jaxpr.outvars, step.second.jaxpr.jaxpr.outvars, strict=True
            )
        )
        return more / (self.examples.second - self.examples.first)

    # ---- the program

    def at(self, bucket: int) -> Lengthening:
        return Lengthening(self, bucket)


@dataclass(eq=False)
class Lengthening:
    """The program of a family at a bucket: when `function` was traced, `outputs` and `largest` are known."""

    family: Family
    bucket: int
    outputs: list[tuple[Dim, ...]] = field(default_factory=list)
    largest: int = 0

    def shapes(self, sharding: Any) -> list[jax.ShapeDtypeStruct]:
        """Of its arguments: the inputs, the packed numbers, then T and the offsets that are given."""
        description = self.family.description
        shapes = [
            (tuple(size_at(dim, self.bucket) for dim in dims), stored_dtype(dtype))
            for dims, (dtype, _) in zip(self.family.input_dims, description["input_layouts"], strict=True)
        ]
        for name, dtype in (("num_floats", "float32"), ("num_doubles", "float64"), ("num_integers", "int64")):
            if description[name]:
                shapes.append(((description[name],), jnp.dtype(dtype)))
        num_switches = sum(len(step.first.switches) for step in self.family.steps)
        shapes.append(((1 + sum(self.family._given) + num_switches,), jnp.dtype("int64")))
        return [jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for shape, dtype in shapes]

    def function(self, *arguments: jax.Array) -> tuple[jax.Array, ...]:
        description = self.family.description
        inputs: list[int] = description["inputs"]
        rest = iter(arguments[len(inputs) :])
        packs: dict[str, Iterator[Any]] = {}
        for name, dtype in (("num_floats", "float32"), ("num_doubles", "float64"), ("num_integers", "int64")):
            packs[dtype] = _unpacked(next(rest), description[name]) if description[name] else iter(())
        numbers = next(rest)
        num_offsets = 1 + sum(self.family._given)
        offsets = _unpacked(numbers[1:], num_offsets - 1)
        settings = _unpacked(numbers[num_offsets:], numbers.shape[0] - num_offsets)
        evaluator = Lengthened(self.family.examples, self.bucket, numbers[0])
        values = {
            local: Padded(array, dims)
            for local, dims, array in zip(inputs, self.family.input_dims, arguments, strict=False)
        }
        taken = set(inputs)
        fresh = (local for local in itertools.count() if local not in taken)
        out_of_range = []
        for step in self.family.steps:
            operands = [values[link] for link in step.links]
            operands += [Padded(next(packs[dtype]), ()) for dtype in number_dtypes(step.entry)]
            operands += [Padded(next(offsets), ()) for is_given in step.inputs if is_given]
            evaluator.switches = {id(switch): next(settings) != 0 for switch in step.first.switches}
            results = evaluator.run(step.first.jaxpr, step.second.jaxpr, operands)
            made = len(results) - len(step.first.bounds_checks)
            out_of_range += [result.array for result in results[made:]]
            for result in results[:made]:
                values[next(fresh)] = result
        wanted = [values[local] for local in description["outputs"]]
        self.outputs = [value.dims for value in wanted]
        self.largest = evaluator.largest
        arrays = tuple(value.array for value in wanted)
        return (*arrays, jnp.stack(out_of_range)) if out_of_range else arrays


def _unpacked(array: jax.Array, count: int) -> Iterator[jax.Array]:
    return (array[place] for place in range(count))
