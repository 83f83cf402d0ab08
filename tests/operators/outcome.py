"""What came out of one entry: a JSON row."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field

from tests.operators.database import Entry


@dataclass
class Outcome:
    """Filled in while an entry's samples run."""

    samples: int = 0  # those that the CPU serves
    failures: list[str] = field(default_factory=list)
    inaccurate: int = 0  # failures in which the device is wrong, and not only rounded otherwise than the CPU

    def fail(self, what: str, text: str, accurate: bool = False) -> None:
        found = f"{what}: {' '.join(text.split())[:300]}"
        if accurate or self.inaccurate:
            self.failures.append(found)
        else:
            self.failures.insert(0, found)  # the first that is told is one that is more than rounding
        self.inaccurate += not accurate


@dataclass(frozen=True)
class Row:
    """``samples`` of 0 means that the CPU serves none of them: the entry does not count."""

    database: str
    name: str
    variant: str
    dtype: str
    passed: bool
    accurate: bool  # passed, or wherever it failed as near to the result in float64 as the CPU is
    native: bool  # nothing ran on the CPU
    samples: int
    failures: int
    failure: str  # the first one
    fallbacks: dict[str, int]
    seconds: float

    @property
    def entry(self) -> Entry:
        return Entry(self.database, self.name, self.variant, self.dtype)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(line: str) -> Row:
        return Row(**json.loads(line))


def row_of(entry: Entry, outcome: Outcome, fallbacks: dict[str, int], seconds: float) -> Row:
    return Row(
        entry.database,
        entry.name,
        entry.variant,
        entry.dtype,
        passed=not outcome.failures,
        accurate=not outcome.inaccurate,
        native=not fallbacks,
        samples=outcome.samples,
        failures=len(outcome.failures),
        failure=outcome.failures[0] if outcome.failures else "",
        fallbacks=fallbacks,
        seconds=round(seconds, 2),
    )
