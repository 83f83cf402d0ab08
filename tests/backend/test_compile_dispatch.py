"""Plain `torch.compile(model)`: tpu graphs go to XLA, and nothing else changes."""

import subprocess
import sys

import pytest
import torch
from torch import Tensor
from torch._inductor import compile_fx as inductor_of_pytorch

pytestmark = pytest.mark.usefixtures("forgotten_by_dynamo")


@pytest.fixture
def inductor(monkeypatch):
    """The configurations with which inductor was called."""
    seen = []
    compile_fx = inductor_of_pytorch.compile_fx

    def recorded(module, inputs, config_patches=None, **given):
        if config_patches is not None:  # else it calls itself
            seen.append(dict(config_patches))
        return compile_fx(module, inputs, config_patches=config_patches, **given)

    monkeypatch.setattr(inductor_of_pytorch, "compile_fx", recorded)
    return seen


def poly(x: Tensor) -> Tensor:
    return (x * x + 2 * x).sum()


def recorded_graphs() -> int:
    return sum("tpu_graph" in call for call, _ in torch.tpu.recent_ops())


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mode": "max-autotune"},
        {"options": {"epilogue_fusion": True}},
        {"dynamic": True},
        {"backend": "inductor"},
        {"backend": "inductor", "mode": "reduce-overhead"},
    ],
    ids=str,
)
def test_tpu_tensors_are_compiled_by_xla_whatever_is_asked_of_inductor(options, inductor):
    x = torch.arange(4.0)
    assert torch.compile(poly, **options)(x.to("tpu")).item() == poly(x).item()
    assert recorded_graphs() > 0
    assert not inductor


def test_a_graph_that_makes_its_own_tensors():
    assert torch.compile(lambda: torch.ones(3, device="tpu") * 2)().tolist() == [2, 2, 2]


@pytest.mark.parametrize(
    ("options", "config"),
    [
        ({}, {}),
        ({"mode": "default"}, {}),
        ({"mode": "reduce-overhead"}, {"triton.cudagraphs": True}),
        ({"backend": "inductor", "mode": "reduce-overhead"}, {"triton.cudagraphs": True}),
        (
            {"options": {"epilogue_fusion": False, "max-autotune": True}},
            {"epilogue_fusion": False, "max_autotune": True},
        ),
    ],
    ids=str,
)
def test_cpu_tensors_go_to_inductor_with_their_mode_and_options(options, config, inductor):
    x = torch.arange(4.0)
    assert torch.compile(poly, **options)(x).item() == poly(x).item()
    assert [{key: seen[key] for key in config} for seen in inductor] == [config]
    assert config or inductor == [{}]


@pytest.mark.parametrize("device", ["cpu", "tpu"])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "fastest"}, "Unrecognized mode=fastest"),
        ({"options": {"speed": 1}}, "Unexpected optimization option speed"),
    ],
)
def test_what_inductor_does_not_know_it_still_refuses(options, message, device):
    with pytest.raises(RuntimeError, match=message):
        torch.compile(poly, **options)(torch.ones(2, device=device))


def test_one_function_serves_both_devices():
    fast = torch.compile(poly)
    x = torch.arange(4.0)
    assert fast(x).item() == fast(x.to("tpu")).item() == fast(x).item()


def test_a_default_of_the_user_s_own_is_kept():
    called = []

    def own(module, inputs):
        called.append(module)
        return module

    torch.compiler.set_default_backend(own)
    try:
        torch.compile(poly)(torch.ones(2, device="tpu"))
    finally:
        from tpu_backend.compiled import dispatch

        torch.compiler.set_default_backend(dispatch.by_device)
    assert called


def test_import_torch_imports_no_dynamo_and_both_backends_are_there_when_it_comes():
    script = """
import sys, torch
assert "torch._dynamo" not in sys.modules and "jax" not in sys.modules
assert [finder.name for finder in sys.meta_path if type(finder).__name__ == "_AfterImport"]
assert "tpu" in torch.compiler.list_backends()
assert torch._dynamo.backends.registry.get_default_backend().__module__ == "tpu_backend.compiled.dispatch"
import torch.nn.attention.flex_attention
assert not [finder.name for finder in sys.meta_path if type(finder).__name__ == "_AfterImport"]
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
