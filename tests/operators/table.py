"""Rows counted by database and dtype."""

from __future__ import annotations

from collections.abc import Sequence

from tests.operators.database import DATABASES, DTYPES
from tests.operators.outcome import Row


def counted(rows: Sequence[Row]) -> list[Row]:
    """The denominator: entries of which the CPU serves a sample, and what failed before that was known."""
    return [row for row in rows if row.samples or not row.passed]


def counts(rows: Sequence[Row]) -> list[tuple[str, str, int, int, int]]:
    """(database, dtype, passed, counted, native) for each pair that has rows."""
    found = []
    for database in DATABASES:
        for dtype in DTYPES:
            here = counted([row for row in rows if (row.database, row.dtype) == (database, dtype)])
            if here:
                found.append(
                    (
                        database,
                        dtype,
                        sum(row.passed for row in here),
                        len(here),
                        sum(row.native for row in here),
                    )
                )
    return found


def percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %"


def table(rows: Sequence[Row]) -> str:
    lines = [f"{'database':<10} {'dtype':<10} {'pass':>5} {'total':>6} {'':>8} {'native':>8}"]
    for database, dtype, passed, total, native in counts(rows):
        lines.append(
            f"{database:<10} {dtype:<10} {passed:>5} {total:>6} {percent(passed, total):>8} "
            f"{percent(native, total):>8}"
        )
    return "\n".join(lines)
