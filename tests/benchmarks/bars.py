"""A figure, the bar that it must hold, and the table of both."""

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

HOLDS = {"<=": operator.le, ">=": operator.ge, "==": operator.eq}


@dataclass(frozen=True)
class Row:
    """One line of the table: `figure` must be `relation` to `bar`; `detail` says what it was made of."""

    name: str
    figure: float
    relation: Literal["<=", ">=", "=="]
    bar: float
    detail: str = ""

    @property
    def holds(self) -> bool:
        return HOLDS[self.relation](self.figure, self.bar)


def print_table(rows: Sequence[Row]) -> bool:
    """Print the rows as a table and return whether every bar holds."""
    cells = [("figure of", "bar", "figure", "", "made of")]
    for row in rows:
        verdict = "pass" if row.holds else "FAIL"
        cells.append((row.name, f"{row.relation} {row.bar:g}", f"{row.figure:.4g}", verdict, row.detail))
    widths = [max(len(line[column]) for line in cells) for column in range(5)]
    for line in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip())
    failed = [row.name for row in rows if not row.holds]
    print(
        f"{len(rows) - len(failed)} of {len(rows)} bars hold"
        + (f"; short of: {', '.join(failed)}" * bool(failed))
    )
    return not failed
