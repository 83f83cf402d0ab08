"""Every compilation of this process, with its cause."""

from __future__ import annotations

import itertools
import logging
from collections import deque
from typing import NamedTuple

from tpu_backend.runtime.causes import Cause

log = logging.getLogger("tpu_backend.compile")

_NAMED = 8


class Compilation(NamedTuple):
    """One compiled program: its number, from 1; the operations in it, by overload; seconds; why."""

    number: int
    operations: tuple[str, ...]
    seconds: float
    cause: Cause

    def __str__(self) -> str:
        names = ", ".join(self.operations[:_NAMED]) + (", ..." if len(self.operations) > _NAMED else "")
        count = f"{len(self.operations)} op{'s' * (len(self.operations) != 1)}"
        return f"compiled {count}: {names}, in {self.seconds:.2f} s because of {self.cause}"


_numbers = itertools.count(1)
_recent: deque[Compilation] = deque(maxlen=256)


def record(operations: tuple[str, ...], seconds: float, cause: Cause) -> None:
    compilation = Compilation(next(_numbers), operations, seconds, cause)
    _recent.append(compilation)
    log.info("%s", compilation)


def compilations() -> list[Compilation]:
    """The last 256, oldest first."""
    return list(_recent)
