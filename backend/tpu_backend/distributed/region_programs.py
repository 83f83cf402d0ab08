"""What the ranks of a region launch together: they compare what they have recorded before they compile it.

Where all have recorded the same it is one program, or a chain that is the same in all of them. Else it is a
chain of links in turn: those that all ranks launch, with the collectives, and each rank's own. What all have
recorded alike is common.

A slice starts where it did at compilation (its start is a constant) if all ranks start there; a start that
differs by rank or moves becomes an input for ever. So the ranks compare their first launches. Later ones wait
for nobody, as long as they are covered by what was compared.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, NoReturn

from tpu_backend.distributed import agreement, peers
from tpu_backend.runtime.chain import Chain, Interface
from tpu_backend.runtime.parts import Part
from tpu_backend.runtime.sketch import (
    Common,
    Sketch,
    aligned,
    digest_of,
    own_stages,
    parts_of,
    sketch_of,
    stages,
)
from tpu_backend.runtime.tape import Tape
from tpu_backend.runtime.target import Target, target_for
from tpu_backend.runtime.user_line import first_line, user_line
from tpu_backend.untraced import untraced

_NUM_COMPARED = 3  # launches: a start that moves by its rank's number is seen at the second one

_MOVES = (
    f"a start that moves on some ranks alone must do so within the first {_NUM_COMPARED} calls, or be a "
    "tensor (x[start + torch.arange(n)])"
)
_RULE = "all ranks must make the same collectives in a region (torch.tpu.spmd), and read at the same places"


@dataclass(eq=False)
class Agreement:
    """What the ranks have agreed on for one tape."""

    target: Target
    offset_is_input: list[bool]
    parts: list[Part] | None  # None: all ranks have recorded the same
    interfaces: dict[int, Interface]  # of the parts that all ranks launch, by place
    form: _Form
    known: _Known
    version: int  # of the form

    @property
    @untraced
    def is_settled(self) -> bool:
        """Whether a launch that it covers need not be compared any more."""
        return self.version == self.form.version and self.known.num_compared >= _NUM_COMPARED

    @untraced
    def announcer(self, keys: Sequence[str], num_operations: int) -> Callable[[], None]:
        """What tells the other ranks of a launch, before it, by the keys of its links."""
        if self.target.groups:  # a link with collectives of one group is keyed by its ranks
            common = digest_of(self.known.digest, sorted(self.form.inputs), [*self.interfaces.values()])
        else:
            common = digest_of([keys[place] for place in self.interfaces] if self.parts else list(keys))
        text = f"a region's program of {num_operations} operations, first at {user_line()}"
        is_first = True

        @untraced
        def announce() -> None:
            nonlocal is_first
            agreement.launch(self.target.ranks, common, text, waits=is_first)
            is_first = False

        return announce

    def is_as(self, other: Agreement) -> bool:
        """Whether both say the same of one tape."""
        return (
            self.offset_is_input == other.offset_is_input
            and self.parts == other.parts
            and self.interfaces == other.interfaces
            and self.form is other.form
        )


@dataclass
class _Known:
    """Of tapes that have the same common operations."""

    digest: str
    num_compared: int = 0
    starts: dict[tuple[int, int], int] = field(default_factory=dict)  # by common operation and number
    seen: dict[str, Common] = field(default_factory=dict)  # what any rank has around them, by what it reads
    stages: list[int] = field(default_factory=list)  # by common operation
    results: set[str] = field(default_factory=set)  # digests: what one program returns and takes over
    interfaces: list[Interface] = field(default_factory=list)  # of the links that all ranks launch


@dataclass
class _Form:
    """Of tapes whose operations, of whatever shapes, are each rank's same. The ranks change it together."""

    own: dict[str, tuple[int, ...]]  # the common operations on a tape, by the digest of its operations' names
    version: int = 0
    local: frozenset[int] = frozenset()  # common operations that differ by rank
    inputs: frozenset[tuple[int, int]] = frozenset()  # starts that do, or move
    is_chain: bool = False
    known: dict[str, _Known] = field(default_factory=dict)

    def common(self, sketch: Sketch) -> Common:
        return Common(sketch, self.own[digest_of(sketch.names)])

    def digest(self, common: Common) -> str:
        """What all ranks have alike."""
        return digest_of([each for at, each in enumerate(common.digests()) if at not in self.local])

    def constant_starts(self, common: Common) -> dict[tuple[int, int], int]:
        return {
            (at, position): start
            for at, number in enumerate(common.own)
            for position, start in enumerate(common.sketch.starts[number])
            if at not in self.local and (at, position) not in self.inputs
        }


_forms: dict[
    tuple[tuple[int, ...], tuple[str, ...]], _Form
] = {}  # by ranks and the names of their operations
_compared: set[tuple[str, ...]] = set()  # of each tape that was compared: its operations' digests


def agree(description: dict[str, Any], compares: bool) -> Agreement:
    """Agree with the other ranks on how a segment with collectives is launched. `compares`, even if it is
    covered by what was compared before; else that waits for nobody.

    Raises RuntimeError if other ranks have recorded other collectives, or as `agreement.call` does.
    """
    meeting = _Meeting(description)
    made = None if compares else meeting.covered()
    if made is None:
        made = meeting.compared()
    before: Agreement | None = description["agreement"]
    if before is None or not before.is_as(made):
        return made
    before.version, before.known = made.version, made.known
    return before


class _Meeting:
    """Of ranks, over the segment that each has recorded."""

    def __init__(self, description: dict[str, Any]) -> None:
        self._description = description
        self._target = target_for(description)
        self._tape = Tape.of(description)
        self._sketch = sketch_of(self._tape, description["offsets"], self._target)
        self._names = digest_of(self._sketch.names)
        self._results = digest_of(description["inputs"], description["outputs"], description["donated"])

    def covered(self) -> Agreement | None:
        """The agreement if all ranks know what this one will launch. Forms with most in common come first."""
        for form, common, known in self._settled():
            if self._is_covered(form, common, known):
                return self._agreement(form)
        return None

    def _settled(self) -> Iterator[tuple[_Form, Common, _Known]]:
        """What the ranks have settled for the same operations."""
        fitting = [
            form
            for (ranks, names), form in _forms.items()
            if ranks == self._target.ranks and self._names == names[self._place()]
        ]
        for form in sorted(fitting, key=lambda form: len(form.local) - len(next(iter(form.own.values())))):
            common = form.common(self._sketch)
            known = form.known.get(form.digest(common))
            if known is not None and known.num_compared >= _NUM_COMPARED:
                yield form, common, known

    def _is_covered(self, form: _Form, common: Common, known: _Known) -> bool:
        if form.constant_starts(common) != known.starts:
            return False
        if not form.is_chain:
            return self._results in known.results
        if common.within(known.stages) != next(iter(known.seen.values())).within(known.stages):
            return False
        of_own = own_stages(common, known.stages)
        is_in_order = all(
            of_own[maker] <= of_own[number] for number in common.own for maker in common.makers(number)
        )
        return is_in_order and all(
            set(own.outputs) <= set(agreed.outputs) and agreed.donated.items() <= own.donated.items()
            for own, agreed in zip(self._own_interfaces(form, known), known.interfaces, strict=True)
        )

    def compared(self) -> Agreement:
        """Waits for the other ranks, and learns from what they have recorded."""
        sketch = self._sketch
        collectives = [(sketch.names[at], sketch.identities[at]) for at in sketch.collectives()]
        own = digest_of(sketch)
        told = self._gather(json.dumps([digest_of(collectives), self._names, self._results, own]))
        of_collectives, names, results, of_all = map(list, zip(*map(json.loads, told), strict=True))
        if len(set(of_collectives)) > 1:
            self._raise_other_collectives()
        sketches = self._distinct(own, of_all)
        form = _forms.get((self._target.ranks, tuple(names)))
        if form is None:
            form = _Form(
                {
                    digest_of(each.names): tuple(found)
                    for each, found in zip(sketches, aligned(sketches), strict=True)
                }
            )
            _forms[self._target.ranks, tuple(names)] = form
        self._learn(form, [form.common(each) for each in sketches], len(set(results)) > 1)
        _compared.add(sketch.identities)
        return self._agreement(form)

    def _learn(self, form: _Form, commons: list[Common], results_differ: bool) -> None:
        own = form.common(self._sketch)
        before = form.local, form.inputs, form.is_chain
        digests = zip(*(each.digests() for each in commons), strict=True)
        form.local |= {at for at, each in enumerate(digests) if len(set(each)) > 1}
        if form.local != before[0]:
            form.known.clear()
        known = form.known.setdefault(form.digest(own), _Known(form.digest(own)))
        form.inputs |= {
            (at, position)
            for (at, position), start in form.constant_starts(own).items()
            for each in commons
            if each.sketch.starts[each.own[at]][position] != known.starts.get((at, position), start)
        }
        known.starts = form.constant_starts(own)
        has_own = any(len(each.own) < len(each.sketch.names) for each in commons)
        form.is_chain |= bool(form.local) or has_own or results_differ
        stages_before, interfaces_before = known.stages, list(known.interfaces)
        if form.is_chain:
            self._plan(form, known, commons)
        known.results.add(self._results)
        known.num_compared += 1
        after = form.local, form.inputs, form.is_chain
        if after != before or (known.stages, known.interfaces) != (stages_before, interfaces_before):
            form.version += 1

    def _agreement(self, form: _Form) -> Agreement:
        common = form.common(self._sketch)
        known = form.known[form.digest(common)]
        parts, interfaces = None, {}
        if form.is_chain:
            parts, is_common = self._parts(form, known)
            places = (place for place, common in enumerate(is_common) if common)
            interfaces = dict(zip(places, known.interfaces, strict=True))
        is_input = [True] * len(self._description["offsets"])
        for at, number in enumerate(common.own):
            begin = self._tape.entries[self._sketch.places[number]].starts[3]
            for position in range(len(self._sketch.starts[number])):
                is_input[begin + position] = at in form.local or (at, position) in form.inputs
        return Agreement(self._target, is_input, parts, interfaces, form, known, form.version)

    def _gather(self, told: str) -> list[str]:
        text = f"{len(self._sketch.names)} operations, launched at {user_line()}"
        return agreement.gather(
            self._target.ranks, f"{text}{self._moved_start() or self._new_operation()}", told
        )

    def _new_operation(self) -> str:
        """Where this tape first differs from all that were compared before, for the error on other ranks; ""
        where it does not.
        """
        own = self._sketch.identities
        place = max((_num_common(own, other) for other in _compared), default=len(own))
        if place == len(own):
            return ""
        entry = self._tape.entries[self._sketch.places[place]]
        line = first_line(entry.summary.number)
        return f", the first new one is number {place + 1}, {entry.signature.described()}, first at {line}"

    def _moved_start(self) -> str:
        """Which slice starts elsewhere than the ranks have settled, in words for those that do not come to
        compare it: they have launched the program with the old start.
        """
        for form, common, known in self._settled():
            for (at, position), start in form.constant_starts(common).items():
                if (before := known.starts.get((at, position), start)) != start:
                    entry = self._tape.entries[self._sketch.places[common.own[at]]]
                    name = f"{entry.summary.overload}, first at {first_line(entry.summary.number)}"
                    return f", where {name}, reads a slice from element {start} instead of {before}: {_MOVES}"
        return ""

    def _distinct(self, own: str, of_all: list[str]) -> list[Sketch]:
        """The sketches that differ: one rank sends each of them."""
        if all(each == own for each in of_all):
            return [self._sketch]
        is_sender = of_all.index(own) == self._place()
        sent = self._gather(json.dumps(self._sketch) if is_sender else "")
        return [Sketch(*_as_tuples(json.loads(each))) for each in sent if each]

    def _place(self) -> int:
        """Of this rank among those of the mesh."""
        assert peers.world is not None
        return self._target.ranks.index(peers.world.rank)

    def _raise_other_collectives(self) -> NoReturn:
        """All ranks come here: it names the first collective that differs."""
        sketch = self._sketch
        own = [sketch.identities[at] for at in sketch.collectives()]
        of_all = [json.loads(each) for each in self._gather(json.dumps(own))]
        first = next(at for at, each in enumerate(zip_longest(*of_all)) if len(set(each)) > 1)
        said = f"has no more than {len(own)}"
        if first < len(own):
            entry = self._tape.entries[sketch.places[sketch.collectives()[first]]]
            said = f"calls {entry.signature.described()}, first at {first_line(entry.summary.number)}"
        ranks_by_saying: dict[str, int] = {}
        for rank, each in zip(self._target.ranks, self._gather(said), strict=True):
            ranks_by_saying.setdefault(each, rank)
        told = "; ".join(f"rank {rank} {each}" for each, rank in ranks_by_saying.items())
        assert peers.world is not None
        peers.world.has_raised = True
        raise RuntimeError(f"ranks differ in collective {first + 1} of a region: {told}: {_RULE}")

    def _plan(self, form: _Form, known: _Known, commons: list[Common]) -> None:
        """The chain, and what the links that all launch must return in any rank."""
        for each in commons:
            known.seen.setdefault(digest_of(each.own, each.sketch.reads), each)
        found = stages([*known.seen.values()], form.local)
        if found != known.stages:
            known.stages, known.interfaces = found, []
        of_all = [json.loads(each) for each in self._gather(json.dumps(self._own_interfaces(form, known)))]
        merged = []
        for at, of_link in enumerate(zip(*of_all, strict=True)):
            given = [
                Interface(outputs, {int(local): output for local, output in donated.items()})
                for outputs, donated in of_link
            ]
            given += known.interfaces[at : at + 1]
            outputs = sorted(set().union(*(each.outputs for each in given)))
            donated = set.intersection(*(set(each.donated.items()) for each in given))
            merged.append(Interface(outputs, dict(sorted(donated))))
        known.interfaces = merged

    def _parts(self, form: _Form, known: _Known) -> tuple[list[Part], list[bool]]:
        of_own = own_stages(form.common(self._sketch), known.stages)
        return parts_of(self._tape, self._sketch, of_own)

    def _own_interfaces(self, form: _Form, known: _Known) -> list[Interface]:
        """What the links that all ranks launch must return here."""
        parts, is_common = self._parts(form, known)
        chain = Chain(self._description, parts)
        return [chain.interface(place) for place, common in enumerate(is_common) if common]


def _num_common(one: Sequence[str], other: Sequence[str]) -> int:
    """How many are equal at the beginning."""
    return next((place for place, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))


def _as_tuples(value: Any) -> Any:
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value
