"""Which runtime numbers of a recorded step are numbers of the host (a learning rate), found by comparing
recordings between which those have changed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

FLOAT, DOUBLE, INTEGER = range(3)
Source = tuple[int, bool]  # a number of the host, by its place; whether negated


class ProgramNumber(NamedTuple):
    """An input of a program that is no tensor: its kind, its place among its kind, its value (None: random),
    the signature of the operation that takes it (-1: the start of a slice).
    """

    kind: int
    place: int
    value: float | int | None
    taker: int

    def is_value_of(self, host: float, negated: bool) -> bool:
        """Whether the host's number arrives as this one."""
        host = -host if negated else host
        assert self.value is not None
        if isinstance(host, int):  # whose zero has no sign, and may have been given one
            return self.value == (np.float32(host) if self.kind == FLOAT else host)
        return is_same(self.value, float(np.float32(host)) if self.kind == FLOAT else host)


def is_same(some: float, other: float) -> bool:
    """0.0 and -0.0 are two numbers, and NaN is one."""
    if some != other:
        return math.isnan(some) and math.isnan(other)
    return math.copysign(1.0, some) == math.copysign(1.0, other)


class Changes:
    """What recordings of one program have shown: which numbers of the host have changed, and which of the
    program's went with them.
    """

    def __init__(self, program: Sequence[ProgramNumber], host: Sequence[float]):
        self._program, self._host = tuple(program), tuple(host)
        self.may_change = [False] * len(self._host)
        self._sources: dict[int, list[Source]] = {}

    def learn(self, program: Sequence[ProgramNumber], host: Sequence[float]) -> ProgramNumber | None:
        """Compare with the recording before. Returns a number of the program that changed, and not as one of
        the host's did.
        """
        changed = {place for place, value in enumerate(host) if not is_same(value, self._host[place])}
        all_changed = [(source, negated) for source in sorted(changed) for negated in (False, True)]
        unclear: set[int] = set()
        strange = None
        for place, (number, before) in enumerate(zip(program, self._program, strict=True)):
            if number.value is None or before.value is None:
                continue
            following = [
                (source, negated)
                for source, negated in self._sources.get(place, all_changed)
                if before.is_value_of(self._host[source], negated)
                and number.is_value_of(host[source], negated)
            ]
            if place not in self._sources and is_same(number.value, before.value):
                unclear |= {source for source, _ in following}  # it rounds to the same: nothing is shown
                continue
            self._sources[place] = following
            if not following:
                strange = strange or number
        self._program, self._host = tuple(program), tuple(host)
        for place in changed - unclear:
            self.may_change[place] = True
        return strange

    def bindings(self) -> list[tuple[int, int, list[Source]]]:
        """(kind, place, sources) of each number of the program that follows the host's."""
        return [
            (self._program[place].kind, self._program[place].place, sources)
            for place, sources in self._sources.items()
        ]
