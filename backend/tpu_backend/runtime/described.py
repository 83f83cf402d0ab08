"""Segments that are described and not run: this process stands for one rank of a slice that is not here.

Their values have shapes and dtypes, and no memory. Reading one raises.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np

from tpu_backend.runtime.dtypes import stored_dtype
from tpu_backend.runtime.tape import Tape


@dataclass
class Slice:
    """The chips of a slice in the order of the ranks, and the segments that this process has recorded."""

    name: str
    devices: tuple[Any, ...]
    rank: int
    segments: list[dict[str, Any]] = field(default_factory=list)


here: Slice | None = None
"""What programs are described for; None: they are run."""


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
            f"a {self.dtype}{list(self.shape)} has no value here: programs are compiled ahead of time and "
            "not run; leave out item(), print and what else reads a tensor"
        )


@dataclass(frozen=True, eq=False)
class Described:
    """What the stream takes for a loaded program; its results are `NoArray`s. See `compiler.Executable`."""

    results: tuple[tuple[tuple[int, ...], np.dtype], ...]
    key: str
    handlers: tuple[()] = ()
    bounds_checks: tuple[()] = ()
    is_padded: bool = False
    source: str = "memory"

    def execute(self, arrays: list[Any], with_tokens: bool) -> Described:
        return self

    def consume_with_handlers(self, handlers: Any) -> list[NoArray]:
        return [NoArray(shape, dtype) for shape, dtype in self.results]

    def consume_token(self) -> NoArray:
        return NoArray((), np.dtype(np.float32))


def describe(description: dict[str, Any]) -> Described:
    """Note a segment instead of compiling it."""
    assert here is not None
    here.segments.append(description)
    layouts = Tape.of(description).layouts
    results = tuple((layouts[local][1], stored_dtype(layouts[local][0])) for local in description["outputs"])
    return Described(results, key=f"segment {len(here.segments)}")
