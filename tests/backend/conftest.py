"""Many tests of the device look at what is recorded, cut, launched and kept; others at what XLA computes."""

import logging
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch

from tests.backend.quick_xla import quick_programs

_QUICK = (
    "test_aliasing",
    "test_attention",
    "test_blocked_attention",
    "test_capture",
    "test_capture_reach",
    "test_capture_told",
    "test_compile_causes",
    "test_compile_control_flow",
    "test_compile_flex_attention",
    "test_compile_sizes",
    "test_compile_split",
    "test_compile_transformers",
    "test_compiled",
    "test_composites",
    "test_data_dependent",
    "test_debug_mode",
    "test_differentiation",
    "test_document_attention",
    "test_dropout_attention",
    "test_errors",
    "test_events",
    "test_factorisations",
    "test_grad_scaler",
    "test_grid_sampling",
    "test_growing_sizes",
    "test_jax_function",
    "test_launcher",
    "test_linear",
    "test_linear_cross_entropy",
    "test_lowering_training",
    "test_meta_kernels",
    "test_migrate",
    "test_modes",
    "test_nested",
    "test_optimizers",
    "test_parts",
    "test_range_checks",
    "test_recurrent",
    "test_regions",
    "test_rehearsal",
    "test_repeats",
    "test_room",
    "test_sparse",
    "test_stream",
    "test_threads",
)
"""Files of the first kind that take long. All others compile as for users: random bits depend on fusion."""


@pytest.fixture(autouse=True, scope="module")
def compiled_quickly(request: pytest.FixtureRequest) -> Iterator[None]:
    is_quick = request.module.__name__.rpartition(".")[2] in _QUICK
    with quick_programs() if is_quick else nullcontext():
        yield


@pytest.fixture
def no_fallback() -> Iterator[None]:
    """Nothing that the test does is left to the CPU."""
    torch.tpu.reset_fallback_stats()
    yield
    assert torch.tpu.fallback_stats() == {}


@pytest.fixture
def forgotten_by_dynamo() -> Iterator[None]:
    """Dynamo knows no code of other tests, and afterwards none of this one."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture
def whole_graphs(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """No graph of the test is split."""
    with caplog.at_level(logging.INFO, "tpu_backend.compile"):
        yield
    assert "is split" not in caplog.text
