"""Tests of the Trainer look at what runs do, and less at the code that XLA makes of their programs."""

from collections.abc import Iterator
from contextlib import nullcontext

import pytest

from tests.backend.quick_xla import quick_programs

_AS_FOR_USERS = (
    "test_execution",
    "test_interrupts",
    "test_recipe_runs",
    "test_recompute",
    "test_resume",
    "test_signals",
)
"""Files that compare the bits of several programs or with other processes, or losses on record."""


@pytest.fixture(autouse=True, scope="module")
def compiled_quickly(request: pytest.FixtureRequest) -> Iterator[None]:
    is_quick = request.module.__name__.rpartition(".")[2] not in _AS_FOR_USERS
    with quick_programs() if is_quick else nullcontext():
        yield
