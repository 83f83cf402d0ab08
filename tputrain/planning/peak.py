"""The buffers that are live when a compiled step uses most memory, by the order of its instructions.

The compiler says how large all temporaries are, and not which. A buffer is taken to be there from the
instruction that makes it to the last one that reads it. Gaps between buffers are not in it, nor what is made
inside of calls and branches.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tputrain.figures import memory_text
from tputrain.parallel.step_schedule import Origin, origin

_SAME = frozenset(("bitcast", "tuple", "while", "opt-barrier", "optimization-barrier", "get-tuple-element"))
"""Their results are their operands."""
_OF_OTHERS = frozenset(("parameter", "constant"))
"""Theirs are no temporaries."""
_KEPT = 20  # buffers of a peak, the largest
_LINES, _SHOWN = 6, 0.02  # of those so many for people, with so much of it

Place = tuple[str, int]
"""The name of the instruction that made a buffer, and which of its results it is."""
Element = tuple[str, tuple[int, ...], int]
"""Dtype, dims and memory space of a result."""


@dataclass(frozen=True)
class Buffer:
    """So many arrays of one kind."""

    label: str
    """The module and pass that it was recorded in; empty: the compiler made it."""
    operation: str
    described: str
    """Dtype and dims."""
    count: int
    num_bytes: int
    """Of all of them."""
    line: str = ""
    """Of the model, as `file.py:12`; empty: there is none."""

    @property
    def origin(self) -> str:
        """What made them, in words."""
        return Origin(self.label, self.line, self.operation).in_words

    @property
    def amount(self) -> str:
        """How many of what size."""
        times = f"{self.count} x " if self.count > 1 else ""
        return f"{memory_text(self.num_bytes)}  {times}{self.described}"


@dataclass(frozen=True)
class Peak:
    """The moment at which most memory is taken by temporaries."""

    num_bytes: int
    label: str
    """The module and pass that is computed then."""
    buffers: tuple[Buffer, ...]
    """The largest first."""

    @property
    def largest(self) -> list[Buffer]:
        """Those that are worth a line."""
        return [each for each in self.buffers[:_LINES] if each.num_bytes >= _SHOWN * self.num_bytes]


def peak(program: Any) -> Peak:
    """Of a `tpu_backend.hlo.Program`."""
    instructions = program.computations[program.entry]
    lives = _Lives(program, instructions)
    moment, total = lives.largest()
    kinds: defaultdict[tuple[Origin, str], list[int]] = defaultdict(list)
    for kind, size in lives.at(moment):
        kinds[kind].append(size)
    found = [
        Buffer(made.label, made.operation, described, len(sizes), sum(sizes), made.line)
        for (made, described), sizes in kinds.items()
    ]
    return Peak(
        total,
        origin(instructions[moment]).without_numbers().label,
        tuple(sorted(found, key=lambda each: -each.num_bytes)[:_KEPT]),
    )


class _Lives:
    """Of the buffers of a computation: from which instruction to which they are there."""

    def __init__(self, program: Any, instructions: Sequence[Any]):
        self._by_name = {each.name: each for each in instructions}
        self.elements: dict[str, list[Element]] = {
            each.name: [(*shape, space) for shape, space in zip(each.results, each.spaces, strict=True)]
            for each in instructions
        }
        self._held: dict[str, list[Place | None]] = {}  # by instruction: the buffers of its results
        self._sizes: dict[Place, int] = {}
        self._begin: dict[Place, int] = {}
        self._end: dict[Place, int] = {}
        self._length = len(instructions)
        self._inner: dict[int, _Lives] = {}  # of the bodies of loops, by the loops' places
        for number, each in enumerate(instructions):
            touched = self._held[each.name] = list(self._buffers(each))
            if each.opcode != "get-tuple-element":  # it touches one of its operand's
                touched = touched + [buffer for name in each.operands for buffer in self._of(name)]
            for buffer in touched:
                if buffer is not None:
                    self._begin.setdefault(buffer, number)
                    self._end[buffer] = number
            if each.opcode == "while" and each.called in program.computations:
                self._inner[number] = _Lives(program, program.computations[each.called])
            if each.is_root:  # results take the memory of arguments
                self._sizes |= {buffer: 0 for buffer in self._held[each.name] if buffer is not None}
        self._compute_in_place(instructions)

    def largest(self) -> tuple[int, int]:
        """The instruction at which most is there, and so many bytes."""
        changes: defaultdict[int, int] = defaultdict(int)
        for buffer, begin in self._begin.items():
            changes[begin] += self._sizes[buffer]
            changes[self._end[buffer] + 1] -= self._sizes[buffer]
        now, found = 0, (0, 0)
        for number in range(self._length):
            now += changes[number]
            inside = self._inner[number].largest()[1] if number in self._inner else 0
            found = max(found, (number, now + inside), key=lambda each: each[1])
        return found

    def at(self, number: int) -> Iterator[tuple[tuple[Origin, str], int]]:
        """The buffers that are there at an instruction: origin, dtype and dims; and their bytes."""
        for buffer, begin in self._begin.items():
            if begin <= number <= self._end[buffer] and self._sizes[buffer]:
                name, place = buffer
                dtype, dims, _ = self.elements[name][place]
                described = f"{dtype}[{','.join(map(str, dims))}]"
                made = origin(self._by_name[name]).without_numbers()
                yield (made, described), self._sizes[buffer]
        if (inner := self._inner.get(number)) is not None:
            yield from inner.at(inner.largest()[0])

    def _compute_in_place(self, instructions: Sequence[Any]) -> None:
        """A result takes the memory of an operand that ends there, where the compiler allows it."""
        ends = dict(self._end)
        first: dict[Place, Place] = {}  # the buffer whose memory it takes
        for number, each in enumerate(instructions):
            for operand, result in each.in_place:
                given, made = next(iter(self._of(each.operands[operand])), None), (each.name, result)
                if given is None or ends[given] != number or not self._sizes.get(made):
                    continue
                memory = first.get(given, given)
                if self._sizes[memory] == self._sizes[made]:
                    first[made] = memory
                    self._end[memory] = max(self._end[memory], self._end[made])
                    self._sizes[made] = 0

    def _of(self, name: str) -> list[Place | None]:
        return self._held.get(name, [])

    def _buffers(self, instruction: Any) -> Iterator[Place | None]:
        elements = self.elements[instruction.name]
        if instruction.opcode in _OF_OTHERS:
            yield from [None] * len(elements)
            return
        given = [
            (element, buffer)
            for name in instruction.operands
            for element, buffer in zip(self.elements.get(name, ()), self._of(name), strict=True)
        ]
        opcode = instruction.opcode
        is_same = opcode in _SAME or opcode.endswith("-done")
        if is_same and instruction.index is not None:  # of a nested tuple it counts tuples, not arrays
            given = [each for each in given[instruction.index :] if each[0] == elements[0]] or given
        elif is_same and len(given) == len(elements):
            yield from (buffer for _, buffer in given)
            return
        elif opcode.endswith("-done") and opcode != "copy-done":
            given.reverse()  # a start has its operands before its results; a copy's has the result first
        for place, element in enumerate(elements):
            is_given = is_same or (opcode.endswith("-start") and not (opcode == "copy-start" and place == 0))
            match = next((at for at, (other, _) in enumerate(given) if other == element), None)
            if is_given and match is not None:
                yield given.pop(match)[1]
            elif is_same:
                yield None
            else:
                is_elsewhere = element[2] != 0
                self._sizes[instruction.name, place] = 0 if is_elsewhere else instruction.sizes[place]
                yield instruction.name, place
