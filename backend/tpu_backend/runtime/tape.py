"""A recorded segment, decoded: its entries, the values they read and make, and where their numbers are."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from tpu_backend.runtime.dtypes import stored_dtype
from tpu_backend.runtime.signature import Signature, Summary, summaries

LayoutKey = tuple[int, tuple[int, ...]]  # dtype and dims


class Entry(NamedTuple):
    """One recorded operation."""

    summary: Summary
    precision: int | None  # PyTorch's setting for matrix products, where the lowering reads it
    links: Sequence[int]  # the values it reads
    made: Sequence[int]  # the values it makes
    starts: tuple[int, int, int, int]  # the first of its floats, doubles, integers and offsets
    circumstances: int  # see csrc/record/signature.h

    @property
    def signature(self) -> Signature:
        """The operation, decoded."""
        return self.summary.signature

    @property
    def words(self) -> list[int]:
        """What stands for the operation on a tape, before its links."""
        return [self.summary.number] if self.precision is None else [self.summary.number, self.precision]


@dataclass
class Tape:
    """The entries of a segment, and the layout of each of its values, by number."""

    entries: list[Entry]
    layouts: dict[int, LayoutKey]

    @staticmethod
    def of(description: dict[str, Any]) -> Tape:
        """The tape of a segment as the recorder describes it."""
        inputs: list[int] = description["inputs"]
        layouts = {
            local: (dtype, tuple(dims))
            for local, (dtype, dims) in zip(inputs, description["input_layouts"], strict=True)
        }
        taken = set(inputs)
        fresh = (local for local in itertools.count() if local not in taken)
        found = []
        starts = 0, 0, 0, 0
        for (entry, precision, links), circumstances in zip(
            summaries(description["tape"]), description["circumstances"], strict=True
        ):
            made = list(itertools.islice(fresh, len(entry.layouts)))
            layouts.update(zip(made, entry.layouts, strict=True))
            found.append(Entry(entry, precision, links, made, starts, circumstances))
            starts = tuple(map(sum, zip(starts, entry.num_numbers, strict=True)))  # type: ignore[assignment]
        return Tape(found, layouts)

    def num_bytes(self, local: int) -> int:
        """The size of a value."""
        dtype, dims = self.layouts[local]
        return math.prod(dims) * stored_dtype(dtype).itemsize

    def last_reads(self) -> dict[int, int]:
        """For each value that is read: the last entry that reads it."""
        return {local: place for place, entry in enumerate(self.entries) for local in entry.links}

    def crossing_bytes(self) -> np.ndarray:
        """For each place between two entries: the bytes of the values made before it and read after it."""
        change = np.zeros(len(self.entries) + 2, np.int64)
        last_reads = self.last_reads()
        for place, entry in enumerate(self.entries):
            for local in entry.made:
                if (last := last_reads.get(local, place)) > place:
                    change[place + 1] += self.num_bytes(local)
                    change[last + 1] -= self.num_bytes(local)
        return np.cumsum(change)
