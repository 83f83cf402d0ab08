"""The list of models, and how its rows are printed and written."""

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from tests.models import architectures, classics, compare, generation, timm_models
from tests.models.compare import Row


@dataclass(frozen=True)
class Entry:
    """A model of the list, and what makes its row."""

    name: str
    family: str
    check: Callable[[], Row]

    def row(self) -> Row:
        """An exception is a row that fails, with the exception's first line."""
        try:
            return self.check()
        except Exception as error:
            first_line = (str(error).strip().splitlines() or [""])[0]
            return Row(self.name, self.family, problems=(f"{type(error).__name__}: {first_line}",))


_TRAINED = (
    *(architecture.case() for architecture in architectures.ARCHITECTURES),
    *timm_models.CASES,
    *classics.CASES,
)
ENTRIES = (
    *(Entry(case.name, case.family, partial(compare.check, case)) for case in _TRAINED),
    *(Entry(g.title, "generation", partial(generation.check, g)) for g in generation.GENERATIONS),
)

HEADER = (
    f"{'model':32} {'family':20} {'':4} {'seconds':>7} {'compilations':>12} {'fallbacks':>9}"
    f" {'loss error':>10} {'gradient error':>14}"
)


def line(row: Row) -> str:
    verdict = "pass" if row.passed else "FAIL"
    numbers = (
        f"{row.seconds:7.1f} {row.compilations:12} {sum(row.fallbacks.values()):9}"
        f" {row.loss_error:10.1e} {row.gradient_error:14.1e}"
    )
    problems = "".join(f"\n    {problem}" for problem in row.problems)
    return f"{row.name:32} {row.family:20} {verdict} {numbers}{problems}"


def json_line(row: Row) -> str:
    return json.dumps(dataclasses.asdict(row) | {"passed": row.passed})
