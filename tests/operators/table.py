"""Rows counted by database and dtype."""

from __future__ import annotations

from collections.abc import Sequence

from tests.operators.database import DATABASES, DTYPES
from tests.operators.outcome import Row


def counted(rows: Sequence[Row]) -> list[Row]:
    """The denominator: entries of which the CPU serves a sample, and what failed before that was known."""
    return [row for row in rows if row.samples or not row.passed]


def percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %"


def table(rows: Sequence[Row]) -> str:
    """A line for each database and dtype that has rows, and one for each database."""
    lines = [f"{'database':<10} {'dtype':<10} {'pass':>5} {'of':>5} {'':>8} {'accurate':>9} {'native':>8}"]
    found = counted(rows)
    for database in DATABASES:
        of_database = [row for row in found if row.database == database]
        parts = {dtype: [row for row in of_database if row.dtype == dtype] for dtype in DTYPES}
        if sum(bool(here) for here in parts.values()) > 1:
            parts["all"] = of_database
        lines += [_line(database, dtype, here) for dtype, here in parts.items() if here]
    return "\n".join(lines)


def _line(database: str, dtype: str, rows: Sequence[Row]) -> str:
    passed, accurate, native = (
        sum(getattr(row, kind) for row in rows) for kind in ("passed", "accurate", "native")
    )
    total = len(rows)
    return (
        f"{database:<10} {dtype:<10} {passed:>5} {total:>5} {percent(passed, total):>8} "
        f"{percent(accurate, total):>9} {percent(native, total):>8}"
    )
