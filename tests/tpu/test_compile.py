"""Training steps and the lowerings that they are made of compile for real TPUs; none has to be here."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from tests.tpu.chips import ENVIRONMENT, TOPOLOGIES, compiler_is_installed
from tests.tpu.collect import collect
from tests.tpu.compile_all import compile_calls
from tests.tpu.compiler import ROOT
from tests.tpu.device_calls import device_calls
from tpu_backend.lowering import CannotCompile, Lowering
from tpu_backend.runtime import segment
from tpu_backend.runtime.compiler_options import FOR_ALL, FOR_COLLECTIVES, FOR_SEVERAL_HOSTS, wanted_for

needs_compiler = pytest.mark.skipif(
    not compiler_is_installed(), reason="libtpu, the TPU compiler, is not installed (Linux on x86-64 only)"
)

_OPERATORS = """
    add mul div where softmax log_softmax addmm bmm nn.functional.layer_norm nn.functional.batch_norm
    nn.functional.embedding nn.functional.cross_entropy nn.functional.conv2d nn.functional.max_pool2d
    nn.functional.dropout scatter_add index_put cumsum topk
"""


def printed_by(module: str) -> Any:
    """The JSON that a module prints, run as a process with the TPU compiler."""
    paths = [str(ROOT / "backend"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-m", module],
        env={**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@needs_compiler
@pytest.mark.sweep
def test_activation_checkpointing_saves_memory_on_a_tpu():
    temporaries = printed_by("tests.tpu.recomputed_layers")
    assert temporaries["layers"] < 0.4 * temporaries["kept"]
    assert temporaries["layers"] < temporaries["products"] < 0.7 * temporaries["kept"]
    assert temporaries["offload"] < 0.4 * temporaries["kept"]
    of_inputs = 6 * 4 * 1024 * 128 * 4  # layers, rows, tokens, features, bytes
    assert 0 < temporaries["host"] <= of_inputs


@needs_compiler
def test_training_steps_compile_for_every_chip():
    steps = printed_by("tests.tpu.training_steps")
    assert {(step["step"], step["chip"]) for step in steps} == {
        (name, chip) for name in ("mlp", "llama") for chip in TOPOLOGIES
    }
    assert [step for step in steps if step["problem"] is not None] == []
    assert all(step["num_ops"] > 20 for step in steps)


@needs_compiler
def test_long_attention_compiles_to_kernels_whose_memory_grows_with_the_length():
    found = printed_by("tests.tpu.long_attention")
    assert {each["chip"] for each in found} == set(TOPOLOGIES)
    for each in found:
        length = each["length"]
        blocks = length // 1024
        pairs = 4 * 1024**2 * blocks * (blocks + 1) // 2  # of 4 heads: the blocks that a causal mask leaves
        if each["ranks"] == 2:
            pairs = 4 * length**2 // 4  # of half of the queries, at a place in the middle
        if each["window"] > 1:
            pairs = 4 * 1024**2 * (2 * blocks - 1)  # of its own block, and of the one before
        assert each["kernels"] == {"fwd": pairs, "dq": pairs, "dkv": pairs}
        assert each["temporaries"] < 4 * length * 64 * 40  # a part of the scores: those have length**2 * 4


@needs_compiler
def test_products_of_groups_and_their_gradients_are_kernels():
    found = printed_by("tests.tpu.grouped_products")
    assert {each["chip"] for each in found} == set(TOPOLOGIES)
    for each in found:
        assert each["flops"] == [2 * 4096 * 512 * 384] * 3
        assert each["cycles"] < 120_000  # all rows for each of 8 groups took a v5e 304,000, a v6e 237,000


@needs_compiler
@pytest.mark.sweep
def test_packed_documents_of_transformers_models_take_memory_that_grows_with_the_length():
    found = printed_by("tests.tpu.packed_documents")
    assert {each["model"] for each in found} == {"llama", "qwen3"}
    for each in found:
        assert each["kernels"] == 2 * 3  # of two layers: forward, and two of the gradients
    for model in ("llama", "qwen3"):
        short, long = (each["temporaries"] for each in found if each["model"] == model)
        assert long < 2.1 * short  # of twice the length


@needs_compiler
def test_common_lowerings_compile_for_every_chip():
    calls = collect(1, 1, lambda name: name in _OPERATORS.split(), [torch.float32])
    assert len({call.lowering for call in calls}) > 30
    assert [row for row in compile_calls(calls, list(TOPOLOGIES)) if row.is_surprise()] == []


@needs_compiler
def test_functions_of_wide_and_complex_numbers_compile_for_every_chip():
    """The compiler refuses some operations for float64, and aborts at some for complex128."""
    names = ("exp", "exp2", "sqrt", "rsqrt", "sigmoid", "log", "pow")
    calls = collect(1, 1, lambda name: name in names, [torch.float64, torch.complex64])
    assert len(calls) > 12
    assert [row for row in compile_calls(calls, list(TOPOLOGIES)) if row.is_surprise()] == []


@needs_compiler
def test_both_cores_of_a_v4_are_one_device():
    # As a run has them; libtpu's default without a TPU is a device each.
    counted = "from tpu_backend import ahead_of_time; print(len(ahead_of_time.chips('v4:2x2x1')))"
    done = subprocess.run(
        [sys.executable, "-c", counted],
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout.split() == ["4"]


@needs_compiler
@pytest.mark.sweep
def test_every_lowering_compiles_or_says_that_it_does_not():
    assert [row for row in compile_calls(collect(1, 2), list(TOPOLOGIES)) if row.is_surprise()] == []


@pytest.mark.filterwarnings("ignore:aten..linalg_lu_factor_ex has no tpu lowering")
def test_what_a_tpu_cannot_compile_runs_on_its_cpu(monkeypatch):
    monkeypatch.setattr(segment, "target_platform", lambda: "tpu")
    before = torch.tpu.fallback_stats()
    matrix = torch.eye(13, dtype=torch.float64).expand(1, 13, 13) * 3
    factors, pivots, info = torch.linalg.lu_factor_ex(matrix.to("tpu"))
    want = torch.linalg.lu_factor_ex(matrix)
    torch.testing.assert_close((factors.cpu(), pivots.cpu(), info.cpu()), tuple(want))
    name = "aten::linalg_lu_factor_ex"
    assert torch.tpu.fallback_stats().get(name, 0) == before.get(name, 0) + 1


def _lowering(on_tpu: CannotCompile | None) -> Lowering:
    return Lowering("example", lambda self: self, None, frozenset(), frozenset(), False, False, on_tpu)


def test_a_declaration_holds_for_its_dtypes_only():
    limited = _lowering(CannotCompile("no 64-bit integers", frozenset({"int64"})))
    assert limited.compiles_on_tpu(["float32", "int32"])
    assert not limited.compiles_on_tpu(["float32", "int64"])
    assert not _lowering(CannotCompile("never")).compiles_on_tpu(["float32"])


def test_no_lowering_takes_complex128_to_a_tpu():
    assert not _lowering(None).compiles_on_tpu(["complex128"])
    assert _lowering(None).compiles_on_tpu(["complex64", "float64"])


@pytest.mark.sweep
def test_calls_that_are_written_down_stay_on_the_device():
    torch.tpu.reset_fallback_stats()
    calls = device_calls(served=set())
    assert torch.tpu.fallback_stats() == {}
    assert len({call.lowering for call in calls}) > 150


@needs_compiler
def test_programs_have_the_options_of_their_chip():
    found = printed_by("tests.tpu.chip_options")
    assert len(found) == 3
    assert found["TPU v6 lite"][1]["xla_tpu_scoped_vmem_limit_kib"] == 98_304
    for kind, (alone, together, with_an_unknown_one, num_devices) in found.items():
        assert alone == FOR_ALL == wanted_for(kind, 1)
        assert together == with_an_unknown_one == wanted_for(kind, num_devices)


def test_more_memory_on_the_chip_is_for_several_hosts():
    """On four chips the compiler took more than four times as long with it."""
    for num_devices in (1, 8, 9, 256):
        options = wanted_for("TPU v6 lite", num_devices)
        assert ("xla_tpu_scoped_vmem_limit_kib" in options) == (num_devices > 8)


@needs_compiler
def test_an_option_that_the_user_has_set_is_left_alone(monkeypatch):
    first, second, *others = FOR_COLLECTIVES["TPU v6 lite"]
    monkeypatch.setenv("LIBTPU_INIT_ARGS", f"--{first}=false --{second}=disabled")
    found = printed_by("tests.tpu.chip_options")
    assert list(found["TPU v6 lite"][1]) == [*FOR_ALL, *others, *FOR_SEVERAL_HOSTS["TPU v6 lite"]]
