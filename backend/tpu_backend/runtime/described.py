"""Segments that are described and not run: this process stands for one rank of a slice that is not here.

Their values have shapes and dtypes, and no memory. Reading one raises.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np

from tpu_backend import _C
from tpu_backend.runtime.dtypes import stored_dtype
from tpu_backend.runtime.tape import Tape


@dataclass
class Slice:
    """The chips of a slice in the order of the ranks, and the segments that this process has recorded."""

    name: str
    devices: tuple[Any, ...]
    rank: int
    segments: list[dict[str, Any]] = field(default_factory=list)
    _marks: list[tuple[int, str]] = field(default_factory=list)  # entries recorded before, and a name

    def mark(self, label: str) -> None:
        """Name the entries that are recorded from here on, until the next mark."""
        self._marks.append((_num_recorded(), label))

    def add(self, segment: dict[str, Any]) -> None:
        """Note a segment that was cut just now, with the names of its entries. One that is recorded again is
        noted again.
        """
        if self._marks:
            count = len(segment["circumstances"])
            segment["labels"] = list(_labels(self._marks, _num_recorded() - count, count))
            del self._marks[:-1]
        self.segments.append(segment)


def _num_recorded() -> int:
    return _C.compile_stats(0)["ops_recorded"]


def _labels(marks: list[tuple[int, str]], first: int, count: int) -> Iterator[str]:
    """Of each entry the newest mark before it."""
    following = iter(marks)
    label, pending = "", next(following, None)
    for place in range(first, first + count):
        while pending is not None and pending[0] <= place:
            label, pending = pending[1], next(following, None)
        yield label


here: Slice | None = None
"""What programs are described for; None: they are run."""


NO_VALUE = "has no value here"
_numbers = itertools.count()


class NoArray:
    """Stands where an array would be."""

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype):
        self.shape, self.dtype = shape, dtype
        self.size = math.prod(shape)
        self.nbytes = self.size * dtype.itemsize

    def is_deleted(self) -> bool:
        return False

    def is_ready(self) -> bool:
        return True

    def block_until_ready(self) -> NoArray:
        return self

    def __array__(self, *_: Any, **__: Any) -> NoReturn:
        raise RuntimeError(
            f"a {self.dtype}{list(self.shape)} {NO_VALUE}: programs are compiled ahead of time and "
            "not run; leave out item(), print and what else reads a tensor"
        )


@dataclass(frozen=True, eq=False)
class Described:
    """What the stream takes for a loaded program; its results are `NoArray`s. See `compiler.Executable`."""

    segment: dict[str, Any]
    results: tuple[tuple[tuple[int, ...], np.dtype], ...]
    key: str
    handlers: tuple[()] = ()
    bounds_checks: tuple[()] = ()
    is_padded: bool = False
    source: str = "memory"

    def execute(self, arrays: list[Any], with_tokens: bool) -> Described:
        assert here is not None
        here.add(dict(self.segment))
        return self

    def consume_with_handlers(self, handlers: Any) -> list[NoArray]:
        return [NoArray(shape, dtype) for shape, dtype in self.results]

    def consume_token(self) -> NoArray:
        return NoArray((), np.dtype(np.float32))


def describe(description: dict[str, Any]) -> Described:
    """What stands for the program of a segment, and notes it where it would be launched."""
    layouts = Tape.of(description).layouts
    results = tuple((layouts[local][1], stored_dtype(layouts[local][0])) for local in description["outputs"])
    return Described(description, results, key=f"segment {next(_numbers)}")
