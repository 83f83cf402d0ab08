"""Where a long segment is cut into parts, so that equal parts share a program.

A segment is cut where its entries repeat themselves (the layers of a model, forward and backward) and where
lists of tensors do (an optimizer's, a layer's tensors each time). FSDP2 gathers a layer's weights during the
layer before; parts gather them where they are needed, else the last layer would be unlike the others.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from tpu_backend import _C
from tpu_backend.runtime.lists import (
    elements_made,
    elements_read,
    kind_of,
    list_length,
    part_of,
    shares_buffers,
)
from tpu_backend.runtime.repeats import Repeat, find_repeats
from tpu_backend.runtime.signature import Summary
from tpu_backend.runtime.tape import Entry, Tape

# Shorter stretches are not worth a launch of their own.
_SHORTEST_REPEAT = 12

# What a segment must repeat to be cut at all. Two layers compile no sooner apart: the first step of a Llama
# (115 entries a layer) took 1.0 (2 layers), 0.9 (4) and 0.4 (12) times as long as with one program.
_FEWEST_TIMES = 3
_FEWEST_SAVED = 100  # entries that need not be compiled
_FEWEST_SAVED_IN_TURN = 40  # where the same is compiled for several sizes

# How often a loop must come round to be cut at its turns: two sizes show what grows.
_FEWEST_TURNS = 3


class Piece(NamedTuple):
    """An entry, by its number; or of one on lists the elements [first, last)."""

    entry: int
    first: int = 0
    last: int | None = None


Part = list[Piece]


class Plan(NamedTuple):
    """The parts of a segment in order: one where there is nothing to share, and only there."""

    parts: list[Part]
    grows: bool  # they are turns of a loop that differ in sizes alone: padded, they share programs


def plan_parts(tape: Tape) -> Plan:
    """How a segment is taken apart. One without gradients is cut first at the turns of a loop that grow."""
    return _Planner(tape).plan()


def grows_with_gradients(tape: Tape) -> bool:
    """Whether most of it is a loop that would share programs if no gradients were recorded."""
    planner = _Planner(tape)
    if not planner.has_gradients:
        return False
    return 2 * sum(turn.end - turn.begin for turn in planner.turns_that_grow()) > len(tape.entries)


class _Planner:
    def __init__(self, tape: Tape) -> None:
        self._order = order_with_late_gathers(tape)  # by place: the entry of the segment
        self._tape = tape = Tape([tape.entries[entry] for entry in self._order], tape.layouts)
        self._lengths = [_length(entry) for entry in tape.entries]
        self._crossing = tape.crossing_bytes()
        self._parts: list[Part] = []
        self._most_times = self._num_saved = 0
        self._has_single_graph = False  # of torch.compile: it may take longer than all that might be shared
        self.has_gradients = any(not entry.circumstances & _C.WITHOUT_GRADIENTS for entry in tape.entries)

    def plan(self) -> Plan:
        parts, grows = self._parts_by_place()
        of_entries = [[piece._replace(entry=self._order[piece.entry]) for piece in part] for part in parts]
        return Plan(of_entries, grows)

    def _parts_by_place(self) -> tuple[list[Part], bool]:
        """The plan, with places in `_order` instead of entries."""
        end = len(self._tape.entries)
        turns = [] if self.has_gradients else self.turns_that_grow()
        if not turns:
            return self._plan(0, end, _FEWEST_SAVED), False
        parts, done = [], 0
        for turn in turns:
            for begin, stop in [(done, turn.begin), *turn.stretches()]:
                parts += self._plan(begin, stop, _FEWEST_SAVED_IN_TURN)
            done = turn.end
        return parts + self._plan(done, end, _FEWEST_SAVED_IN_TURN), True

    def turns_that_grow(self) -> list[Repeat]:
        """The turns of loops that differ in sizes alone. The operations and their outlines tell enough:
        whether turns share a program is decided elsewhere.
        """
        outlines = _numbered(entry.summary.outline for entry in self._tape.entries)
        repeats = find_repeats(outlines, self._crossing, _SHORTEST_REPEAT)
        return [repeat for repeat in repeats if repeat.times >= _FEWEST_TURNS and self._grows(repeat)]

    def _grows(self, repeat: Repeat) -> bool:
        """Whether most turns differ from those before them."""
        turns = [
            [entry.summary.number for entry in self._tape.entries[begin:end]]
            for begin, end in repeat.stretches()
        ]
        num_changed = sum(turn != before for turn, before in zip(turns[1:], turns))
        return 2 * num_changed >= repeat.times

    def _plan(self, first: int, end: int, fewest_saved: int) -> list[Part]:
        self._parts, self._most_times, self._num_saved, self._has_single_graph = [], 0, 0, False
        begin = first
        while begin < end:
            length, made = self._lengths[begin], dict[int, int]()
            stop = begin
            while stop < end and self._lengths[stop] == length and self._keeps_elements_apart(stop, made):
                stop += 1
            if length == 0:
                self._add_stretch(begin, stop)
            else:
                self._add_lists(begin, stop, length)
            begin = stop
        is_little = self._most_times < _FEWEST_TIMES or self._num_saved < fewest_saved
        if is_little or self._has_single_graph:
            self._parts = []
            self._add(first, end)
        return self._joined()

    def _keeps_elements_apart(self, place: int, made: dict[int, int]) -> bool:
        """Whether an entry on lists reads, of what entries on lists before it have made, the same element
        alone: then the elements can be taken one after the other. `made`: of which element each value is.
        """
        if self._lengths[place] == 0:
            return True
        entry = self._tape.entries[place]
        read = zip(entry.links, elements_read(entry.signature), strict=True)
        if any(made.get(local, element) != element for local, element in read):
            return False
        made.update(zip(entry.made, elements_made(entry.signature), strict=True))
        return True

    def _joined(self) -> list[Part]:
        """The parts, with neighbouring ones merged that occur only once."""
        keys = [tuple(map(self._key, part)) for part in self._parts]
        times = Counter(keys)
        joined: list[Part] = []
        is_open = False  # the last of them is shared by nobody
        for part, key in zip(self._parts, keys, strict=True):
            is_shared = times[key] > 1
            if is_open and not is_shared:
                joined[-1] += part
            else:
                joined.append(part)
            is_open = not is_shared
        return joined

    def _key(self, piece: Piece) -> tuple[int, ...]:
        """The operation that a piece is."""
        words = self._tape.entries[piece.entry].words
        if piece.last is not None:
            return (part_of(words[0], piece.first, piece.last), *words[1:])
        return tuple(words)

    def _note(self, repeat: Repeat, entries_a_place: int) -> None:
        self._most_times = max(self._most_times, repeat.times)
        self._num_saved += repeat.saved * entries_a_place

    def _add(self, begin: int, end: int) -> None:
        if begin < end:
            self._parts.append([Piece(place) for place in range(begin, end)])

    def _add_single(self, begin: int, end: int) -> None:
        """Entries that no others repeat."""
        self._has_single_graph |= any(
            _is_graph(self._tape.entries[place].summary) for place in range(begin, end)
        )
        self._add(begin, end)

    def _add_stretch(self, begin: int, end: int) -> None:
        words = _numbered(tuple(entry.words) for entry in self._tape.entries[begin:end])
        done = begin
        for repeat in find_repeats(words, self._crossing[begin : end + 1], _SHORTEST_REPEAT):
            self._note(repeat, 1)
            self._add_single(done, begin + repeat.begin)
            stretch = words[repeat.begin :][: repeat.length]
            cuts = _cuts_inside(stretch, self._crossing[begin + repeat.begin :])
            for first, _ in repeat.stretches():
                for start, stop in pairwise(cuts):
                    self._add(begin + first + start, begin + first + stop)
            done = begin + repeat.end
        self._add_single(done, end)

    def _add_lists(self, begin: int, end: int, length: int) -> None:
        """Entries [begin, end) all take lists of this length."""
        signatures = [entry.signature for entry in self._tape.entries[begin:end]]
        elements = _numbered(
            tuple(kind_of(signature, element) for signature in signatures) for element in range(length)
        )
        repeats = find_repeats(elements, np.zeros(length + 1), 1)
        if not repeats:
            self._add(begin, end)
            return
        done = 0
        for repeat in repeats:
            self._note(repeat, end - begin)
            for first, last in [(done, repeat.begin), *repeat.stretches()]:
                self._add_elements(begin, end, first, last)
            done = repeat.end
        self._add_elements(begin, end, done, length)

    def _add_elements(self, begin: int, end: int, first: int, last: int) -> None:
        if first < last:
            self._parts.append([Piece(place, first, last) for place in range(begin, end)])


def _cuts_inside(words: np.ndarray, cost: np.ndarray) -> list[int]:
    """The cuts inside one stretch of a repeat, 0 and its end included. It is cut only if repeats make up half
    of it, as layers do in each of the steps whose gradients are accumulated.
    """
    repeats = find_repeats(words, cost[: len(words) + 1], _SHORTEST_REPEAT)
    num_saved = sum(repeat.saved for repeat in repeats)
    times = max((repeat.times for repeat in repeats), default=0)
    if times < _FEWEST_TIMES or num_saved < max(_FEWEST_SAVED, len(words) // 2):
        return [0, len(words)]
    cuts = {0, len(words)}
    for repeat in repeats:
        inside = _cuts_inside(words[repeat.begin :][: repeat.length], cost[repeat.begin :])
        cuts.update(first + cut for first, _ in repeat.stretches() for cut in inside)
    return sorted(cuts)


def order_with_late_gathers(tape: Tape) -> Sequence[int]:
    """The entries in an order in which each all_gather comes just before the first that reads it. What only
    such gathers read moves along. It depends on the tape alone, so ranks with equal tapes have one order.
    """
    readers = defaultdict[int, list[int]](list)
    for place, entry in enumerate(tape.entries):
        for local in entry.links:
            readers[local].append(place)
    before: dict[int, int] = {}  # by what is put off: the entry that it comes before
    for place in reversed(range(len(tape.entries))):
        entry = tape.entries[place]
        read_by = [reader for local in entry.made for reader in readers[local]]
        is_gather = entry.summary.overload == "tpu_collective::all_gather"
        if read_by and (is_gather or all(reader in before for reader in read_by)):
            before[place] = min(before.get(reader, reader) for reader in read_by)
    if not before:
        return range(len(tape.entries))
    return sorted(
        range(len(tape.entries)), key=lambda place: (before.get(place, place), place not in before, place)
    )


def _length(entry: Entry) -> int:
    """How many elements its lists have; 0 where it cannot be taken apart."""
    length = list_length(entry.summary)
    return 0 if length and shares_buffers(entry.signature, entry.links) else length


def _numbered(things: Iterator[Any]) -> np.ndarray:
    """A number for each thing, the same for equal ones."""
    numbers: dict[Any, int] = {}
    return np.array([numbers.setdefault(thing, len(numbers)) for thing in things], np.int64)


def _is_graph(entry: Summary) -> bool:
    """Whether it is a graph of torch.compile."""
    return entry.overload.startswith("tpu_graph::")
