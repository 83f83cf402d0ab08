"""How the stream runs a segment: by one program or by a chain of programs, each with its slots.

The slots of a program say which of the segment's values and numbers it takes, and which values it makes
(`Link` in csrc/launch/program.h). A chain is planned once for a tape (`parts.py`). Equal parts share a
program.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import numpy as np

from tpu_backend.runtime.lists import elements_made, elements_read, leaves_of, part_of
from tpu_backend.runtime.parts import Part, Piece, Plan, plan_parts
from tpu_backend.runtime.signature import RuntimeArg, Signature, TensorArg
from tpu_backend.runtime.tape import Entry, Tape

T = TypeVar("T")

_MOST_PLANS = 64  # that are kept: one is asked for when it is counted and again when it is compiled


class Link(NamedTuple):
    """A loaded program and its slots, as the stream launches it. `source` says where the program came from:
    "compiled", "disk" or "memory".
    """

    executable: Any
    source: str
    inputs: list[int]  # values of the segment
    is_donated: list[bool]  # by input
    outputs: list[int]  # values of the segment; -1 where nobody wants it
    dropped: list[int]  # values that no later link reads, and that are no results
    floats: list[int]  # places among the segment's numbers
    doubles: list[int]
    integers: list[int]
    offsets: list[int]  # those that are inputs; they come behind the integers
    checked: list[tuple[int, int]]  # places among the segment's checked entries, and the entry here


def whole_link(description: dict[str, Any], executable: Any, source: str) -> Link:
    """The link of a segment that is one program."""
    donated = set(description["donated"])
    return Link(
        executable,
        source,
        inputs=description["inputs"],
        is_donated=[local in donated for local in description["inputs"]],
        outputs=description["outputs"],
        dropped=[],
        floats=list(range(description["num_floats"])),
        doubles=list(range(description["num_doubles"])),
        integers=list(range(description["num_integers"])),
        offsets=[place for place, is_input in enumerate(description["offset_is_input"]) if is_input],
        checked=list(enumerate(description["checked"])),
    )


_plans: OrderedDict[tuple[int, ...], tuple[Tape, Plan]] = OrderedDict()


def planned(description: dict[str, Any]) -> tuple[Tape, Plan]:
    """A segment's tape and how it is taken apart."""
    key = (*description["tape"], -1, *description["circumstances"])
    if (found := _plans.pop(key, None)) is None:
        tape = Tape.of(description)
        found = tape, plan_parts(tape)
    _plans[key] = found
    while len(_plans) > _MOST_PLANS:
        _plans.popitem(last=False)
    return found


@dataclass
class PartOfChain:
    """A part as a segment of its own. It numbers its values in the order in which it meets them."""

    tape: list[int] = field(default_factory=list)
    circumstances: list[int] = field(default_factory=list)
    values: list[int] = field(default_factory=list)  # by own number: that of the whole segment
    inputs: list[int] = field(default_factory=list)  # own numbers
    origin: dict[int, int] = field(
        default_factory=dict
    )  # by own number: the input whose memory it takes over
    floats: list[int] = field(default_factory=list)  # places, as in `Link`
    doubles: list[int] = field(default_factory=list)
    integers: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    checked: list[tuple[int, int]] = field(default_factory=list)

    def made(self) -> Iterator[int]:
        """The own numbers of the values that it makes."""
        inputs = set(self.inputs)
        return (local for local in range(len(self.values)) if local not in inputs)


class Interface(NamedTuple):
    """What a part's program returns and takes over, in the part's own numbers: the same in all ranks."""

    outputs: list[int]  # ascending
    donated: dict[int, int]  # by input, ascending: the output that takes over its memory


class Chain:
    """The parts of a segment, what each must return, and what describes its program."""

    def __init__(
        self,
        description: dict[str, Any],
        parts: Sequence[Part] | None = None,
        interfaces: Mapping[int, Interface] = MappingProxyType({}),
    ) -> None:
        """Of these parts (None: as it is planned); some, by place, with an interface that is given."""
        self._whole = description
        self._grows = False
        if parts is None:
            self._tape, (parts, self._grows) = planned(description)
        else:
            self._tape = Tape.of(description)
        self._interfaces = interfaces
        self.parts = _Builder(self._tape, description).build(parts)
        self._results = set(description["outputs"])
        self._last_reader = {
            part.values[local]: place for place, part in enumerate(self.parts) for local in part.inputs
        }
        self.descriptions: list[dict[str, Any]] = [{} for _ in self.parts]
        by_tape: dict[Any, list[int]] = defaultdict(list)
        for place, part in enumerate(self.parts):
            own = place if place in interfaces else None
            by_tape[tuple(part.tape), self._layouts(part), own].append(place)
        for alike in by_tape.values():
            self._describe(alike)

    def link(self, place: int, executable: Any, source: str) -> Link:
        """The link of a part whose program is there."""
        part, description = self.parts[place], self.descriptions[place]
        donated = set(description["donated"])
        wanted = self._wanted(place)
        met = [part.values[local] for local in range(len(part.values))]
        return Link(
            executable,
            source,
            inputs=[part.values[local] for local in part.inputs],
            is_donated=[local in donated for local in part.inputs],
            outputs=[part.values[local] if local in wanted else -1 for local in description["outputs"]],
            dropped=[
                local
                for local in met
                if local not in self._results and self._last_reader.get(local, place) <= place
            ],
            floats=part.floats,
            doubles=part.doubles,
            integers=part.integers,
            offsets=[
                offset
                for offset, is_input in zip(part.offsets, description["offset_is_input"], strict=True)
                if is_input
            ],
            checked=part.checked,
        )

    def interface(self, place: int) -> Interface:
        """What a part must return here, and what it may take over."""
        wanted = sorted(self._wanted(place))
        return Interface(wanted, self._donations(place, wanted))

    def _layouts(self, part: PartOfChain) -> tuple[Any, ...]:
        return tuple(self._tape.layouts[part.values[local]] for local in part.inputs)

    def _is_read_after(self, local: int, place: int) -> bool:
        return self._last_reader.get(local, -1) > place

    def _wanted(self, place: int) -> set[int]:
        """Own numbers of what a part makes and somebody looks at."""
        part = self.parts[place]
        return {
            local
            for local in part.made()
            if part.values[local] in self._results or self._is_read_after(part.values[local], place)
        }

    def _describe(self, alike: Sequence[int]) -> None:
        """Describe the programs of parts that have one tape: one program where they donate alike. It returns
        what any of them must.
        """
        wanted = sorted(set().union(*map(self._wanted, alike)))
        starts = [[self._whole["offsets"][offset] for offset in self.parts[place].offsets] for place in alike]
        varies = [len(set(starts_here)) > 1 for starts_here in zip(*starts, strict=True)]
        for place in alike:
            part = self.parts[place]
            if place in self._interfaces:
                wanted, donations = self._interfaces[place]
            else:
                donations = self._donations(place, wanted)
            outputs = list(donations.values())
            outputs += [local for local in wanted if local not in outputs]
            self.descriptions[place] = {
                "tape": part.tape,
                "circumstances": part.circumstances,
                "input_layouts": [(dtype, list(dims)) for dtype, dims in self._layouts(part)],
                "inputs": part.inputs,
                "outputs": outputs,
                "donated": list(donations),
                "offsets": [self._whole["offsets"][offset] for offset in part.offsets],
                "offset_is_input": [
                    differs or self._whole["offset_is_input"][offset]
                    for differs, offset in zip(varies, part.offsets, strict=True)
                ],
                "num_floats": len(part.floats),
                "num_doubles": len(part.doubles),
                "num_integers": len(part.integers),
                "may_be_padded": self._whole["may_be_padded"],
                "device": self._whole["device"],
                "in_parts": False,
                "was_evicted": self._whole["was_evicted"],
                "was_in_parts": False,
                "may_time_out": False,
                "agreement": None,
            }

    def _donations(self, place: int, outputs: Sequence[int]) -> dict[int, int]:
        """By input: the output that takes over its memory, ascending. An input is donated if nothing reads it
        later: a value of the chain's own, or one that the segment replaces in its buffer.
        """
        part, layouts = self.parts[place], self._tape.layouts
        replaced = set(self._whole["donated"])
        whole_inputs = set(self._whole["inputs"])
        times_taken = Counter(part.values[local] for local in part.inputs)
        found = {}
        for output in outputs:
            source = part.origin.get(output, -1)
            if source < 0 or layouts[part.values[source]] != layouts[part.values[output]]:
                continue
            local = part.values[source]
            if times_taken[local] > 1:  # another operation reads its memory under another number
                continue
            if self._grows and self._whole["origin"][local] not in whole_inputs:
                continue  # programs that are padded take over nothing that grows
            is_given = local in replaced if local in whole_inputs else local not in self._results
            if is_given and not self._is_read_after(local, place):
                found[source] = output
        return dict(sorted(found.items()))


class _Builder:
    """Builds the parts of a tape in order."""

    def __init__(self, tape: Tape, description: dict[str, Any]) -> None:
        self._tape = tape
        self._origin: list[int] = description["origin"]
        self._newest: dict[int, int] = {}  # by first value in a buffer: what it held when the part began
        self._checked = {entry: place for place, entry in enumerate(description["checked"])}
        self._lists: dict[int, _Elements] = {}  # by entry: one of long lists is cut into many pieces

    def build(self, parts: Sequence[Part]) -> list[PartOfChain]:
        return [self._part(pieces) for pieces in parts]

    def _part(self, pieces: Part) -> PartOfChain:
        part = PartOfChain()
        own: dict[int, int] = {}  # by value of the whole
        inputs: dict[int, int] = {}  # by value that it takes: a number of it
        replaced: dict[int, int] = {}

        def number(local: int) -> int:
            part.values.append(local)
            return len(part.values) - 1

        for entry_here, piece in enumerate(pieces):
            entry = self._tape.entries[piece.entry]
            words = entry.words
            if piece.last is not None:
                words = [part_of(words[0], piece.first, piece.last), *words[1:]]
            part.tape += words
            part.circumstances.append(entry.circumstances)
            if piece.entry in self._checked:
                part.checked.append((self._checked[piece.entry], entry_here))
            # A collective of another rank may read a padded copy of what others read, too, and this one the
            # value itself. So its inputs are its own.
            is_apart = entry.summary.is_collective
            for local in self._links(piece):
                read = own.get(local)
                if read is None or (is_apart and local in inputs):
                    read = inputs[local] = number(local)
                    part.inputs.append(read)
                    if not is_apart:
                        own[local] = read
                part.tape.append(read)
            self._take_numbers(piece, part)
            for made in self._made(piece):
                local = own[made] = number(made)
                first = self._origin[made]
                if (before := inputs.get(self._newest.get(first, first))) is not None:
                    part.origin[local] = before
                replaced[first] = made
        self._newest |= replaced
        return part

    def _elements(self, piece: Piece) -> _Elements:
        if piece.entry not in self._lists:
            self._lists[piece.entry] = _Elements.of(self._tape.entries[piece.entry])
        return self._lists[piece.entry]

    def _links(self, piece: Piece) -> Sequence[int]:
        links = self._tape.entries[piece.entry].links
        return links if piece.last is None else _taken(piece, links, self._elements(piece).read)

    def _made(self, piece: Piece) -> Sequence[int]:
        made = self._tape.entries[piece.entry].made
        return made if piece.last is None else _taken(piece, made, self._elements(piece).made)

    def _take_numbers(self, piece: Piece, part: PartOfChain) -> None:
        entry = self._tape.entries[piece.entry]
        kinds = part.floats, part.doubles, part.integers, part.offsets
        if piece.last is None:
            for taken, start, count in zip(kinds, entry.starts, entry.summary.num_numbers, strict=True):
                taken += range(start, start + count)
            return
        elements = self._elements(piece)
        for kind, place in _taken(piece, elements.places, elements.with_number):
            kinds[kind].append(place)


class _Elements(NamedTuple):
    """Of an entry on lists: of which element each of its values and numbers is; -1: of all."""

    read: np.ndarray
    made: np.ndarray
    with_number: np.ndarray
    places: list[tuple[int, int]]
    """Of each number: its kind, and its place among the segment's numbers of that kind."""

    @staticmethod
    def of(entry: Entry) -> _Elements:
        numbers = _numbers_of(entry.signature)
        next_places = list(entry.starts)
        places = []
        for kind, _ in numbers:
            places.append((kind, next_places[kind]))
            next_places[kind] += 1
        return _Elements(
            np.array(elements_read(entry.signature), np.int64),
            np.array(elements_made(entry.signature), np.int64),
            np.array([element for _, element in numbers], np.int64),
            places,
        )


def _taken(piece: Piece, values: Sequence[T], elements: np.ndarray) -> list[T]:
    """Those values that belong to the elements of a piece, or to all."""
    assert piece.last is not None
    chosen = (elements < 0) | ((elements >= piece.first) & (elements < piece.last))
    return [values[place] for place in np.flatnonzero(chosen).tolist()]


def _numbers_of(entry: Signature) -> list[tuple[int, int]]:
    """Of each number among its arguments, in order: its kind, and of which element it is."""
    found = ((_kind_of_number(leaf.value, entry.wide), leaf.element) for leaf in leaves_of(entry))
    return [(kind, element) for kind, element in found if kind is not None]


def _kind_of_number(value: Any, is_wide: bool) -> int | None:
    """Which of a segment's numbers an argument is, if any: floats, doubles, integers or offsets."""
    if isinstance(value, TensorArg):
        return 3 if value.has_offset else None
    if isinstance(value, RuntimeArg):
        return 2 if value.is_integer else 1 if is_wide else 0
    return None
