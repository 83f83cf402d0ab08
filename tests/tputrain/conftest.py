"""Tests of the Trainer look at what runs do, and less at the code that XLA makes of their programs."""

from collections.abc import Iterator

import pytest
import torch

from tests.backend.quick_xla import quick_xla
from tpu_backend import _C
from tpu_backend.padded import serving
from tpu_backend.runtime import ahead, compiler, compiler_options

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
def quick_programs(request: pytest.FixtureRequest) -> Iterator[None]:
    """Programs are compiled quickly, and other files meet none of them."""
    if request.module.__name__.rpartition(".")[2] in _AS_FOR_USERS:
        yield
        return
    options = compiler_options.options_for
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "options_for", lambda *given: (options(*given) or {}) | quick_xla())
        _forget_programs()
        yield
        _forget_programs()


def _forget_programs() -> None:
    if torch.tpu.is_initialized():
        ahead.forget()
        serving.forget()
        _C.forget_programs(0)
