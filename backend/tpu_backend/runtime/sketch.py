"""A segment as other ranks see it: by operation what it is and what it reads, in names that all ranks share.

Ranks that run the same region record the same collectives. What is between them may differ by rank: an uneven
shard has other shapes and is padded, a part of a sequence has other constants.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Sequence
from difflib import SequenceMatcher
from typing import Any, NamedTuple

from tpu_backend.runtime.parts import Part, Piece
from tpu_backend.runtime.program_key import collective_identity, settled_by_version
from tpu_backend.runtime.signature import Summary
from tpu_backend.runtime.tape import Entry, Tape
from tpu_backend.runtime.target import Target

_LENGTH = 16  # of a digest: ranks compare them, nobody looks for collisions

Read = tuple[int, int]  # an operation and which of its results; -1 and a number: an input


class Sketch(NamedTuple):
    """The operations of a segment in order. What stands for a buffer that nobody has written is none, but an
    input: ranks with empty shards have more of them.
    """

    places: tuple[int, ...]  # by operation: its entry on this rank's tape
    names: tuple[str, ...]
    identities: tuple[str, ...]  # digests of all that shapes its program
    is_collective: tuple[bool, ...]
    reads: tuple[tuple[Read, ...], ...]
    starts: tuple[tuple[int, ...], ...]  # of the slices among its arguments

    def collectives(self) -> list[int]:
        return [number for number, is_collective in enumerate(self.is_collective) if is_collective]


def is_unwritten(entry: Entry) -> bool:
    """Whether an entry stands for a buffer that was read before it was written."""
    return entry.summary.name == entry.summary.overload == "zeros"


def sketch_of(tape: Tape, starts: Sequence[int], target: Target) -> Sketch:
    """The sketch of a segment with these starts of slices."""
    places = [place for place, entry in enumerate(tape.entries) if not is_unwritten(entry)]
    found = [tape.entries[place] for place in places]
    names: dict[int, Read] = {}  # by value
    num_inputs = 0
    reads = []
    for number, entry in enumerate(found):
        for local in entry.links:
            if local not in names:
                names[local] = -1, num_inputs
                num_inputs += 1
        reads.append(tuple(names[local] for local in entry.links))
        names.update((local, (number, at)) for at, local in enumerate(entry.made))
    return Sketch(
        tuple(places),
        tuple(entry.summary.overload for entry in found),
        tuple(digest_of(_identity(entry.summary, target), entry.precision) for entry in found),
        tuple(entry.summary.is_collective for entry in found),
        tuple(reads),
        tuple(
            tuple(starts[entry.starts[3] : entry.starts[3] + entry.summary.num_numbers[3]]) for entry in found
        ),
    )


def digest_of(*things: Any) -> str:
    """A short digest of what prints alike in all processes."""
    return hashlib.sha256(repr(things).encode()).hexdigest()[:_LENGTH]


def _identity(entry: Summary, target: Target) -> Any:
    """What an operation is, in words that all ranks share: a group is an axis of the mesh."""
    if entry.is_collective:
        return collective_identity(entry, target)
    if not settled_by_version(entry.name):  # a function of the user's: its number is this process's own
        return entry.layouts, entry.values, entry.num_links, entry.num_numbers
    return entry.digest


def aligned(sketches: Sequence[Sketch]) -> list[list[int]]:
    """Of each sketch the operations that all have, in order: those of one place in the lists correspond. The
    sketches have equally many collectives, all of which correspond.
    """
    found = [[number] for number in range(len(sketches[0].names))]
    for sketch in sketches[1:]:
        pairs = dict(_pairs(sketches[0], sketch))
        found = [[*numbers, pairs[numbers[0]]] for numbers in found if numbers[0] in pairs]
    return [[numbers[at] for numbers in found] for at in range(len(sketches))]


def _pairs(one: Sketch, other: Sketch) -> Iterator[tuple[int, int]]:
    """The operations that two sketches share, ascending."""
    begin = 0, 0
    ends = [*zip(one.collectives(), other.collectives(), strict=True), (len(one.names), len(other.names))]
    for end in ends:
        mine, its = one.names[begin[0] : end[0]], other.names[begin[1] : end[1]]
        if mine == its:
            yield from zip(range(begin[0], end[0]), range(begin[1], end[1]), strict=True)
        else:
            for block in SequenceMatcher(None, mine, its, autojunk=False).get_matching_blocks():
                for at in range(block.size):
                    yield begin[0] + block.a + at, begin[1] + block.b + at
        if end != ends[-1]:
            yield end
        begin = end[0] + 1, end[1] + 1


class Common(NamedTuple):
    """A sketch beside others, of which all have some operations."""

    sketch: Sketch
    own: tuple[int, ...]  # by common operation: the sketch's own

    def digests(self) -> list[str]:
        """Of each common operation, and of what it reads."""
        common = {number: at for at, number in enumerate(self.own)}
        names: dict[Read, Read] = {}  # of what is not made by a common operation: where it is read first
        found = []
        for at, number in enumerate(self.own):
            # Who made what a collective reads is not compared: that may be each rank's own matter.
            compared = () if self.sketch.is_collective[number] else self.sketch.reads[number]
            read = [
                (common[maker], result)
                if maker in common
                else names.setdefault((maker, result), (-1 - at, position))
                for position, (maker, result) in enumerate(compared)
            ]
            found.append(digest_of(self.sketch.identities[number], read))
        return found

    def makers(self, number: int) -> set[int]:
        """The sketch's own operations whose results one of them reads."""
        return {maker for maker, _ in self.sketch.reads[number] if maker >= 0}

    def read_by_collectives(self) -> dict[int, list[Read | None]]:
        """By collective, as a common operation: which results of common operations it reads; None: others."""
        common = {number: at for at, number in enumerate(self.own)}
        return {
            at: [
                (common[maker], result) if maker in common else None
                for maker, result in self.sketch.reads[number]
            ]
            for at, number in enumerate(self.own)
            if self.sketch.is_collective[number]
        }

    def within(self, stage_of: Sequence[int]) -> list[list[Read | None]]:
        """For each collective: what it reads that is made in the same link, by the stages of the common
        operations.
        """
        return [
            [read if read is not None and stage_of[read[0]] == stage_of[at] else None for read in reads]
            for at, reads in self.read_by_collectives().items()
        ]


def stages(commons: Sequence[Common], local: Collection[int]) -> list[int]:
    """By common operation: the link of a chain that it is part of. All ranks launch the same programs for
    even links. Odd ones hold the operations of `local`, those that not all sketches have, and no collectives.
    """
    found: list[int] = []
    own_of = [list[int]() for _ in commons]  # by sketch: of its own operations so far
    read_by = [common.read_by_collectives() for common in commons]
    apart: set[tuple[int, int]] = set()  # a collective, and what it reads on some ranks alone
    for at, numbers in enumerate(zip(*(common.own for common in commons), strict=True)):
        stage = 0
        for common, own, number in zip(commons, own_of, numbers, strict=True):
            _extend(own, common, number)
            stage = max(stage, _last_read(own, common, number))
        is_collective = commons[0].sketch.is_collective[numbers[0]]
        # What a collective reads is made in its link by all ranks, or by none.
        for reads in zip(*(each[at] for each in read_by), strict=True) if is_collective else ():
            if len(set(reads)) > 1:
                makers = {read[0] for read in reads if read is not None}
                stage = max(stage, 1 + max(found[maker] for maker in makers))
                apart |= {(at, maker) for maker in makers}
        if is_collective or at in local:
            stage = _first_link_from(stage, for_all=is_collective)
        found.append(stage)
        for own in own_of:
            own.append(stage)
    for common, own in zip(commons, own_of, strict=True):
        _extend(own, common, len(common.sketch.names))
    readers = _first_readers(commons, own_of, apart)
    # What reads nothing that was made here (zeros of an optimizer's state) is made where it is read first.
    from_nothing = _made_from_nothing(commons) - set(local)
    return [readers.get(at, stage) if at in from_nothing else stage for at, stage in enumerate(found)]


def _first_readers(
    commons: Sequence[Common], own_of: Sequence[Sequence[int]], apart: Collection[tuple[int, int]]
) -> dict[int, int]:
    """By common operation: the first link that reads it; of one kept `apart`, the one before its reader's."""
    found: dict[int, int] = {}
    for common, own in zip(commons, own_of, strict=True):
        at_of = {number: at for at, number in enumerate(common.own)}
        for number, stage in enumerate(own):
            for at in (at_of[maker] for maker in common.makers(number) if maker in at_of):
                begin = stage - ((at_of.get(number), at) in apart)
                found[at] = min(found.get(at, begin), begin)
    return found


def _made_from_nothing(commons: Sequence[Common]) -> set[int]:
    """Common operations, collectives excepted, that read no operation's results in any sketch."""
    return {
        at
        for at, numbers in enumerate(zip(*(common.own for common in commons), strict=True))
        if not commons[0].sketch.is_collective[numbers[0]]
        and not any(common.makers(number) for common, number in zip(commons, numbers, strict=True))
    }


def _first_link_from(stage: int, for_all: bool) -> int:
    """The first link from this one on that all ranks launch alike, or that is each rank's own."""
    is_for_all = stage % 2 == 0
    return stage + (is_for_all != for_all)


def own_stages(common: Common, stage_of: Sequence[int]) -> list[int]:
    """The stages of a sketch's own operations, by those of the common ones."""
    found: list[int] = []
    for number, stage in zip(common.own, stage_of, strict=True):
        _extend(found, common, number)
        found.append(stage)
    _extend(found, common, len(common.sketch.names))
    return found


def _extend(own: list[int], common: Common, end: int) -> None:
    """With the stages of the operations up to `end`, which only this sketch has."""
    for number in range(len(own), end):
        own.append(_first_link_from(_last_read(own, common, number), for_all=False))


def _last_read(own: Sequence[int], common: Common, number: int) -> int:
    return max((own[maker] for maker in common.makers(number)), default=0)


def parts_of(tape: Tape, sketch: Sketch, stage_of: Sequence[int]) -> tuple[list[Part], list[bool]]:
    """The parts of a chain in order, by the stages of a sketch's operations; and of each whether all ranks
    launch the same program for it.
    """
    stage_of_place = dict(zip(sketch.places, stage_of, strict=True))
    maker = {local: place for place, entry in enumerate(tape.entries) for local in entry.made}
    for place, entry in enumerate(tape.entries):
        for local in entry.links:
            if (unwritten := maker.get(local, -1)) >= 0 and is_unwritten(tape.entries[unwritten]):
                # Another rank may have written it: what all launch takes it.
                stage = stage_of_place[place] - (stage_of_place[place] % 2 == 0)
                stage_of_place[unwritten] = min(stage_of_place.get(unwritten, stage), stage)
    by_stage: dict[int, Part] = {}
    for place in range(len(tape.entries)):
        by_stage.setdefault(stage_of_place.get(place, 1), []).append(Piece(place))
    return [by_stage[stage] for stage in sorted(by_stage)], [stage % 2 == 0 for stage in sorted(by_stage)]
