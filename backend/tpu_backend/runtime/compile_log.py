"""Every compilation of this process, with its cause."""

from __future__ import annotations

import itertools
import logging
import re
import warnings
from collections import deque
from contextlib import suppress
from typing import NamedTuple

from tpu_backend.runtime import transfer
from tpu_backend.runtime.causes import Cause

log = logging.getLogger("tpu_backend.compile")

_NAMED = 8
_MANY = 8  # times that programs have one cause are nothing to speak of
_LAYERS = 16

# By kind of cause: what was seen to help. Each is tried in tests/backend/test_compile_causes.py.
_HELP = {
    "shape": "pad it to a few sizes, such as the next multiple of 64: a size is compiled once; if it comes "
    "from x[mask], keep all of x and multiply by the mask: (x * mask).sum() / mask.sum()",
}
_OTHER_HELP = "TPU_LOGS=compile prints the cause of each"
_HELP_WITH_GRADIENTS = " (where no gradients are wanted, sizes share programs under torch.no_grad())"


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


def _warn_of_many(cause: Cause, seconds: float) -> None:
    """By kind and line, when it was the cause of programs again and again; then whenever twice as often."""
    if cause.kind in _ONCE:
        return
    found = _culprits.setdefault((cause.kind, cause.line), _Culprit())
    if not found.counts(seconds) or found.times != found.told_at:
        return
    found.told_at *= 2
    took = f"; {found.seconds:.0f} s in all" if found.seconds >= 1 else ""
    text = f"tpu: {found.num_programs} programs were compiled because of {cause} (the last of them{took})"
    place = re.match(r"(.+):(\d+): ", cause.line)
    file, number = (place[1], int(place[2])) if place else (__file__, 1)
    help_ = _HELP.get(cause.kind, _OTHER_HELP)
    if cause.kind == "shape" and cause.has_gradients:
        help_ += _HELP_WITH_GRADIENTS
    with suppress(RuntimeWarning):  # made an error, it would fail the program, which is in order
        warnings.warn_explicit(f"{text}; {help_}", RuntimeWarning, file, number)


class _Culprit:
    """What one kind of cause has done at one line."""

    def __init__(self) -> None:
        self.num_programs = self.times = 0
        self.seconds = 0.0  # of its programs
        self.told_at = _MANY + 1  # times
        self._num_since = 0
        self._num_transfers = -1

    def counts(self, seconds: float) -> bool:
        """One program more; whether it is another time. The layers of a model have several sizes, and each is
        compiled in the first step: programs with no transfer between them are one time, up to `_LAYERS`.
        """
        self.num_programs += 1
        self.seconds += seconds
        if self._num_transfers == transfer.count and self._num_since < _LAYERS:
            self._num_since += 1
            return False
        self._num_transfers, self._num_since = transfer.count, 1
        self.times += 1
        return True


_ONCE = ("first", "mode", "whole", "room", "memory")
_culprits: dict[tuple[str, str], _Culprit] = {}
_numbers = itertools.count(1)
_recent: deque[Compilation] = deque(maxlen=256)


def record(operations: tuple[str, ...], seconds: float, cause: Cause) -> None:
    compilation = Compilation(next(_numbers), operations, seconds, cause)
    _recent.append(compilation)
    _warn_of_many(cause, seconds)
    log.info("%s", compilation)


def compilations() -> list[Compilation]:
    """The last 256, oldest first."""
    return list(_recent)
