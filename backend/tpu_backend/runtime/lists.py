"""Operations on lists of tensors (`_foreach_*`, fused optimizers), and the same on parts of the lists.

Such an operation does the same with each element of its lists, so one of them stands for several.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

from tpu_backend.runtime.signature import (
    Argument,
    ListArg,
    RepeatedArg,
    Signature,
    Summary,
    TensorArg,
    add_derived,
    signature,
)

_ON_LISTS = ("aten::_foreach_", "aten::_fused_adam", "aten::_fused_sgd")


def list_length(entry: Signature | Summary) -> int:
    """How many elements its lists have; 0 where it is no operation on lists, or cannot be taken apart."""
    if not entry.overload.startswith(_ON_LISTS):
        return 0
    entry = signature(entry.number) if isinstance(entry, Summary) else entry
    if entry.random or any(output.element < 0 for output in entry.outputs):
        return 0
    lengths = set()
    for argument in entry.arguments:
        if isinstance(argument.value, ListArg):
            if any(isinstance(item, ListArg) for item in argument.value.items):
                return 0
            lengths.add(len(argument.value.items))
        elif isinstance(argument.value, TensorArg) and argument.value.base_dims:
            return 0  # a number for each element, perhaps
    lengths.discard(0)
    return lengths.pop() if len(lengths) == 1 else 0


class Leaf(NamedTuple):
    """An argument, or an element of one that is a list."""

    value: Any
    element: int  # -1 outside a list


def leaves_of(entry: Signature) -> Iterator[Leaf]:
    """Its arguments in the order in which they were recorded, lists taken apart."""
    for argument in entry.arguments:
        if isinstance(argument.value, ListArg):
            yield from (Leaf(item, element) for element, item in enumerate(argument.value.items))
        elif isinstance(argument.value, RepeatedArg):
            yield Leaf(argument.value.item, -1)
        else:
            yield Leaf(argument.value, -1)


def elements_read(entry: Signature) -> list[int]:
    """For each value that the operation reads, in order: of which element it is; -1 outside a list."""
    elements = [
        leaf.element for leaf in leaves_of(entry) if isinstance(leaf.value, TensorArg) and leaf.value.reads
    ]
    return elements + [output.element for output in entry.outputs if output.partial and not output.skip]


def shares_buffers(entry: Signature, links: Sequence[int]) -> bool:
    """Whether it writes several parts of one buffer, so that its elements cannot be taken apart. `links` are
    the values that it reads.
    """
    num_partial = sum(output.partial and not output.skip for output in entry.outputs)
    return len({*links[len(links) - num_partial :]}) < num_partial


def elements_made(entry: Signature) -> list[int]:
    """For each value that the operation makes, in order: of which element it is."""
    return [output.element for output in entry.outputs if not output.skip]


def with_elements(entry: Signature, elements: Sequence[int]) -> Signature:
    """The same operation on these elements of its lists."""
    places = {element: place for place, element in enumerate(elements)}

    def shortened(argument: Argument) -> Argument:
        value = argument.value
        if isinstance(value, RepeatedArg):
            value = RepeatedArg(len(elements), value.item)
        elif isinstance(value, ListArg) and value.items:
            value = ListArg(tuple(value.items[element] for element in elements))
        return replace(argument, value=value)

    return replace(
        entry,
        arguments=tuple(map(shortened, entry.arguments)),
        outputs=tuple(
            replace(output, element=places[output.element])
            for output in entry.outputs
            if output.element in places
        ),
    )


def with_unlike_elements(entry: Signature) -> Signature:
    """An operation on lists with one element of each kind, which says as much of its lowering; any other
    operation as it is.
    """
    if not (length := list_length(entry)):
        return entry
    kinds: dict[tuple[Any, ...], int] = {}  # and an element of each
    for element in range(length):
        kinds.setdefault(_of_any_size(kind_of(entry, element)), element)
    return with_elements(entry, list(kinds.values()))


def _of_any_size(kind: tuple[Any, ...]) -> tuple[Any, ...]:
    """The kind of an element, without sizes and strides if its tensors have one common size: the lowering
    does not depend on it. Tensors of no dims stay so; empty ones keep their size.
    """
    sizes = {item.sizes for item in kind if isinstance(item, TensorArg) and item.sizes}
    if len(sizes) != 1 or 0 in next(iter(sizes)):
        return kind
    return tuple(
        replace(item, base_dims=(), geometry=None, has_offset=False, sizes=(1,) * bool(item.sizes))
        if isinstance(item, TensorArg)
        else item
        for item in kind
    )


def kind_of(entry: Signature, element: int) -> tuple[Any, ...]:
    """What is the same for two elements that the operation treats alike."""
    return tuple(
        argument.value.items[element]
        for argument in entry.arguments
        if isinstance(argument.value, ListArg) and argument.value.items
    )


@cache
def part_of(number: int, first: int, last: int) -> int:
    """The number of the signature that is the operation on elements [first, last) of its lists. Equal parts
    have one number.
    """
    part = with_elements(signature(number), range(first, last))
    digest = hashlib.sha256(repr(replace(part, number=0, digest="")).encode()).hexdigest()
    return add_derived(replace(part, digest=digest), number)
