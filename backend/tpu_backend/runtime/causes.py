"""Why a program was compiled: what sets it apart from the nearest one that was compiled before.

Cold path: asked once a compilation, which takes at least a thousand times as long.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter, deque
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

from tpu_backend import _C
from tpu_backend.runtime.dtypes import TORCH_DTYPES
from tpu_backend.runtime.signature import ConstantArg, RuntimeArg, Signature, Summary, TensorArg, summaries
from tpu_backend.runtime.user_line import first_line, line_of_mode

_KEPT = 256  # programs to compare with
_ALIKE = 0.6  # the share of operations that two programs must have in common to be told apart by one cause
_OTHER_AUTOCAST = (
    0.8  # how much of its likeness a program keeps that was made with autocast switched the other way
)
_IN_AUTOCAST = 1 << 63  # as in csrc/record/signature.h
_LAST_TENSOR = 61
_UNINITIALISED = "zeros"  # stands for memory that is read before it is written, on no line of its own


class Cause(NamedTuple):
    """`kind` is one of KINDS, `text` says what changed, from what to what, `line` where in the program.
    `has_gradients`: gradients of the program may be wanted.
    """

    kind: str
    text: str
    line: str
    has_gradients: bool = True

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}, at {self.line}"


class MadeAgain(NamedTuple):
    """Why torch.compile made a graph although it had made others of the same function: `earlier`."""

    kind: str
    text: str
    earlier: frozenset[str]


KINDS = (
    "first",  # nothing like it was compiled before
    "shape",
    "dtype",
    "static number",  # a number that is part of the program
    "argument",  # another constant that is, or an argument given or not
    "strides",
    "requires_grad",
    "autocast",
    "mode",
    "precision",  # torch.set_float32_matmul_precision
    "graph",  # torch.compile made another graph
    "operations",
    "results",  # others stay alive
    "slice",  # where a slice starts has become an input
    "whole",  # it was run in parts so far
    "room",  # it was evicted when there was room for few more programs
    "memory",  # other inputs' memory is taken over, as in the second step by an optimizer's new state
)


class _Program(NamedTuple):
    mode: str
    tape: tuple[int, ...]
    entries: tuple[Summary, ...]
    precisions: tuple[int | None, ...]
    circumstances: tuple[int, ...]
    inputs: frozenset[int]
    outputs: frozenset[int]
    offsets: tuple[bool, ...]
    names: tuple[str, ...]  # of the operations, graphs of torch.compile without their number
    donated: frozenset[int]


_compiled: deque[_Program] = deque(maxlen=_KEPT)
graphs_made_again: dict[str, MadeAgain] = {}  # by operator, until a program holds it


def causes_of(descriptions: Sequence[dict[str, Any]], mode: str) -> list[Cause]:
    """Why the programs of these segments are compiled. Those given at once are parts of one step: they are
    compared with programs from before, not with each other. Remembers them for those that come after.
    """
    new = [_program(description, mode) for description in descriptions]
    causes = [
        _evicted(program) if description["was_evicted"] else _cause_of(program, description["was_in_parts"])
        for program, description in zip(new, descriptions, strict=True)
    ]
    _compiled.extend(new)
    return [
        cause._replace(has_gradients=not all(each & _C.WITHOUT_GRADIENTS for each in program.circumstances))
        for cause, program in zip(causes, new, strict=True)
    ]


def remember(description: dict[str, Any], mode: str) -> None:
    """The program of this segment was there: nobody asks why. Those that come after are compared with it."""
    program = _program(description, mode)
    for entry in program.entries:
        graphs_made_again.pop(entry.overload, None)
    _compiled.append(program)


def _earlier() -> list[_Program]:
    """Those before, oldest first; a copy, as a finalizer that comes meanwhile may compile."""
    return list(_compiled)


def _evicted(new: _Program) -> Cause:
    text = "it was evicted: the system had room for few more programs (vm.max_map_count)"
    return Cause("room", text, first_line(new.entries[-1].number))


def _cause_of(new: _Program, was_in_parts: bool) -> Cause:
    first = _first(new)
    if was_in_parts and all(old.tape != new.tape for old in _earlier()):
        text = f"what {first.overload} begins was run in parts, which share programs, and becomes one"
        return Cause("whole", text, first_line(first.number))
    if (again := _graph_made_again(new)) is not None:
        return again
    # A program of one operation has no neighbours to tell it by: whether another mode had it is asked first.
    cause = _mode_changed(new) if len(new.entries) == 1 else None
    cause = cause or _difference_from_nearest(new) or _mode_changed(new)
    if cause is not None:
        return cause
    return Cause("first", f"{first.overload} begins it", first_line(first.number))


def _graph_made_again(new: _Program) -> Cause | None:
    """Where it holds graphs that no program held before, but others of the same functions: what torch.compile
    made the first of them for.
    """
    causes = []
    for entry in new.entries:
        again = graphs_made_again.pop(entry.overload, None)
        held = (each.overload for old in _earlier() for each in old.entries)
        if again is not None and not again.earlier.isdisjoint(held):
            text = f"{again.text}, so that torch.compile made {entry.overload}"
            causes.append(Cause(again.kind, text, first_line(entry.number)))
    return causes[0] if causes else None


def _difference_from_nearest(new: _Program) -> Cause | None:
    alike = [(old, _likeness(new, old)) for old in _earlier() if old.mode == new.mode]
    best = max((likeness for _, likeness in alike), default=(0.0, 0.0))
    if best[0] < _ALIKE:
        return None
    return _difference(new, next(old for old, likeness in reversed(alike) if likeness == best))


def _program(description: dict[str, Any], mode: str) -> _Program:
    tape = tuple(description["tape"])
    known = [(entry, precision) for entry, precision, _ in summaries(tape)]
    forms = tuple(entry for entry, _ in known)
    return _Program(
        mode,
        tape,
        forms,
        tuple(precision for _, precision in known),
        tuple(description["circumstances"]),
        frozenset(description["inputs"]),
        frozenset(description["outputs"]),
        tuple(description["offset_is_input"]),
        tuple(_without_number(entry.overload) for entry in forms),
        frozenset(description["donated"]),
    )


def _first(program: _Program) -> Summary:
    """The first operation that a line of the user's has called."""
    called = (entry for entry in program.entries if entry.overload != _UNINITIALISED)
    return next(called, program.entries[0])


@cache
def _without_number(overload: str) -> str:
    """The name of an operation; of a graph of torch.compile without its number."""
    return re.sub(r"^(tpu_graph::[a-z]+)_\d+$", r"\1", overload)


def _likeness(new: _Program, old: _Program) -> tuple[float, float]:
    """The share of operators that both have, then the share of their forms; 0 where both are a single one of
    different lines.
    """
    if new.tape == old.tape:
        return 2.0, 2.0
    if len(new.names) == len(old.names) == 1:
        same_line = first_line(new.entries[0].number) == first_line(old.entries[0].number)
        return float(new.names == old.names and same_line), 0.0
    numbers = [
        [(entry.number, precision) for entry, precision in zip(program.entries, program.precisions)]
        for program in (new, old)
    ]
    in_autocast = _is_in_autocast(new), _is_in_autocast(old)
    if not any(in_autocast):
        return _share(new.names, old.names), _share(*numbers)
    # Autocast puts a copy in front of each operand that it has not cast already.
    share = _share(_without_copies(new.names), _without_copies(old.names))
    return share if all(in_autocast) else share * _OTHER_AUTOCAST, _share(*numbers)


def _is_in_autocast(program: _Program) -> bool:
    return any(each & _IN_AUTOCAST for each in program.circumstances)


def _without_copies(names: tuple[str, ...]) -> tuple[str, ...]:
    """All of them where there are only copies."""
    return tuple(name for name in names if name != "tpu::copy") or names


def _share(some: Sequence[Any], others: Sequence[Any]) -> float:
    """Of two lists: how much of them both have, from 0 to 1."""
    return 2 * sum((Counter(some) & Counter(others)).values()) / (len(some) + len(others))


def _difference(new: _Program, old: _Program) -> Cause | None:
    if new.tape == old.tape:
        return _other_specialization(new, old)
    if (autocast := _autocast_changed(new, old)) is not None:
        return autocast
    places = range(min(len(new.entries), len(old.entries)))
    for place in sorted(places, key=lambda place: new.names[place] == _UNINITIALISED):
        entry, before = new.entries[place], old.entries[place]
        line = first_line(entry.number)
        if new.names[place] != old.names[place]:
            line_before = first_line(before.number)
            place_before = "" if line_before == line else f" ({line_before})"
            return Cause("operations", f"{entry.overload} is where {before.overload} was{place_before}", line)
        if entry.number != before.number:
            return Cause(*_form_changed(entry.signature, before.signature), line)
        if new.precisions[place] != old.precisions[place]:
            return Cause(
                "precision", f"torch.set_float32_matmul_precision was called before {entry.overload}", line
            )
        if (
            text := _requires_grad_changed(entry, new.circumstances[place], old.circumstances[place])
        ) is not None:
            return Cause("requires_grad", text, line)
    longer, is_new = (new, True) if len(new.entries) > len(old.entries) else (old, False)
    if len(new.entries) != len(old.entries):
        entry = longer.entries[min(len(new.entries), len(old.entries))]
        text = f"{entry.overload} and what follows {'is new' if is_new else 'is no longer there'}"
        return Cause("operations", text, first_line(entry.number))
    last = new.entries[-1]
    return Cause("operations", "the same ones read other values", first_line(last.number))


def _other_specialization(new: _Program, old: _Program) -> Cause:
    """The same operations, and a program that returns other results or takes its inputs in another way."""
    for entry, now, before in zip(new.entries, new.circumstances, old.circumstances):
        if (text := _requires_grad_changed(entry, now, before)) is not None:
            return Cause("requires_grad", text, first_line(entry.number))
    last = new.entries[-1]
    line = first_line(last.number)
    if new.offsets != old.offsets:
        return Cause("slice", "it starts somewhere else, which is an input of the program from now on", line)
    if new.outputs == old.outputs and new.donated != old.donated:
        text = f"results take over that of {len(new.donated)} inputs, and took that of {len(old.donated)}"
        return Cause("memory", text, line)
    if new.outputs == old.outputs:
        return Cause("results", "the same ones, which another thread was compiling at the same time", line)
    count = len(new.outputs) - len(old.outputs)
    what = f"{abs(count)} {'more' if count > 0 else 'fewer'}" if count else "others"
    changed = new.outputs - old.outputs if count >= 0 else old.outputs - new.outputs
    maker = _maker(new, min(changed))
    text = f"{what} of its results kept, one that {maker.overload} made"
    return Cause("results", text, first_line(maker.number))


def _maker(program: _Program, local: int) -> Summary:
    """The operation that made this value of a program."""
    made = (entry for entry in program.entries for output in entry.signature.outputs if not output.skip)
    numbers = (number for number in itertools.count() if number not in program.inputs)
    return next(entry for number, entry in zip(numbers, made) if number == local)


def _autocast_changed(new: _Program, old: _Program) -> Cause | None:
    now, before = _is_in_autocast(new), _is_in_autocast(old)
    if now and before:
        return _other_casts(new, old)
    if now == before:
        return None
    # Of the operations it may have changed, one that was first met here: its line is the one that runs now.
    candidates = [
        entry
        for entry, circumstances in zip(new.entries, new.circumstances)
        if not now or circumstances & _IN_AUTOCAST
    ]
    newest = max(entry.number for entry in old.entries)
    last_met = max(candidates, key=lambda entry: entry.number)
    entry = next((entry for entry in candidates if entry.number > newest), last_met)
    state = "on, and was off" if now else "off, and was on"
    return Cause("autocast", f"it is {state}: {entry.signature.described()}", first_line(entry.number))


def _other_casts(new: _Program, old: _Program) -> Cause | None:
    count = len(new.names) - len(old.names)
    if count == 0 or _without_copies(new.names) != _without_copies(old.names):
        return None
    text = f"{abs(count)} {'more' if count > 0 else 'fewer'} casts: it keeps those of weights till its end"
    return Cause("autocast", text, first_line(new.entries[0].number))


def _mode_changed(new: _Program) -> Cause | None:
    """Where the first operation is known from programs of another mode alone."""
    first = new.entries[0]
    if any(old.mode == new.mode and first in old.entries for old in _earlier()):
        return None
    for old in reversed(_earlier()):
        if old.mode != new.mode and first in old.entries:
            text = f"it is {new.mode}, and was {old.mode}: {first.signature.described()}"
            return Cause("mode", text, line_of_mode())
    return None


def _requires_grad_changed(entry: Summary, now: int, before: int) -> str | None:
    changed = (now ^ before) & ~_IN_AUTOCAST
    if not changed:
        return None
    place = (changed & -changed).bit_length() - 1
    names = [name for name, leaf in entry.signature.named_leaves() if isinstance(leaf, TensorArg)]
    name = names[min(place, len(names) - 1)] if place < _LAST_TENSOR else "a tensor"
    verb = "requires a gradient, and did not" if now >> place & 1 else "requires no gradient, and did"
    return f"{name} of {entry.overload} {verb}"


def _form_changed(now: Signature, before: Signature) -> tuple[str, str]:
    """The kind of a difference between two forms of one operator, and what it is."""
    leaves, leaves_before = list(now.named_leaves()), list(before.named_leaves())
    if len(leaves) != len(leaves_before):
        counts = f"{len(leaves)} arguments, and had {len(leaves_before)} (each element of a list is one)"
        return "argument", f"{now.overload} has {counts}"
    for (name, leaf), (_, leaf_before) in zip(leaves, leaves_before):
        if leaf != leaf_before:
            kind = _kind_of_difference(leaf, leaf_before)
            form, form_before = _form(leaf, kind), _form(leaf_before, kind)
            return kind, f"{name} of {now.overload} is {form}, was {form_before}"
    if now.default_dtype != before.default_dtype:
        dtypes = [str(each.default_dtype).removeprefix("torch.") for each in (now, before)]
        return "dtype", f"torch's default dtype is {dtypes[0]}, was {dtypes[1]}, before {now.overload}"
    if now.overload != before.overload:  # graphs of torch.compile
        return "graph", f"{now.overload} of torch.compile is where {before.overload} was"
    sizes, sizes_before = ([each.sizes for each in form.outputs] for form in (now, before))
    if sizes != sizes_before:
        return "shape", f"{now.overload} makes {_listed(sizes)}, and made {_listed(sizes_before)}"
    return "strides", f"what {now.overload} writes to has other strides"


def _listed(sizes: Sequence[tuple[int, ...]]) -> str:
    return ", ".join(str(list(each)) for each in sizes)


def _kind_of_difference(leaf: Any, before: Any) -> str:
    if isinstance(leaf, TensorArg) and isinstance(before, TensorArg):
        if leaf.dtype != before.dtype:
            return "dtype"
        return "shape" if leaf.sizes != before.sizes else "strides"
    if isinstance(leaf, RuntimeArg) and isinstance(before, RuntimeArg):
        return "dtype"
    values = [each.value for each in (leaf, before) if isinstance(each, ConstantArg)]
    is_number = len(values) == 2 and all(isinstance(value, int | float) for value in values)
    return "static number" if is_number else "argument"


def _form(leaf: Any, kind: str) -> str:
    if isinstance(leaf, TensorArg):
        text = f"{_dtype(leaf.dtype)}{list(leaf.sizes)}"
        if kind != "strides":
            return text
        strides = "those of its memory" if leaf.geometry is None else list(leaf.geometry.strides)
        return f"{text} with strides {strides} in a buffer of {list(leaf.base_dims)}"
    if isinstance(leaf, RuntimeArg):
        return f"a number of {_dtype(leaf.dtype)}"
    return repr(leaf.value) if isinstance(leaf, ConstantArg) else "nothing"


def _dtype(number: int) -> str:
    return str(TORCH_DTYPES[number]).removeprefix("torch.")
