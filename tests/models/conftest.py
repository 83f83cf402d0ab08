"""Models train as on the CPU within rounding, whatever code XLA makes of their programs."""

from collections.abc import Iterator

import pytest

from tests.backend.quick_xla import quick_programs


@pytest.fixture(autouse=True, scope="module")
def compiled_quickly() -> Iterator[None]:
    with quick_programs():
        yield
