"""The list of models, and how its rows are printed and written."""

import dataclasses
import json

from tests.models import architectures, classics, timm_models
from tests.models.case import Case
from tests.models.compare import Row

CASES: tuple[Case, ...] = (
    *(entry.case() for entry in architectures.ARCHITECTURES),
    *timm_models.CASES,
    *classics.CASES,
)

HEADER = (
    f"{'model':28} {'family':20} {'':4} {'seconds':>7} {'compilations':>12} {'fallbacks':>9}"
    f" {'loss error':>10} {'gradient error':>14}"
)


def line(row: Row) -> str:
    verdict = "pass" if row.passed else "FAIL"
    numbers = (
        f"{row.seconds:7.1f} {row.compilations:12} {sum(row.fallbacks.values()):9}"
        f" {row.loss_error:10.1e} {row.gradient_error:14.1e}"
    )
    problems = "".join(f"\n    {problem}" for problem in row.problems)
    return f"{row.name:28} {row.family:20} {verdict} {numbers}{problems}"


def json_line(row: Row) -> str:
    return json.dumps(dataclasses.asdict(row) | {"passed": row.passed})
