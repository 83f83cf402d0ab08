"""What a program is compiled for is a parameter: of lowering, of keys, of launches."""

from dataclasses import replace

import pytest
import torch

from tpu_backend.lowering import registry
from tpu_backend.lowering.platforms import lowered_for, lowering_for


@pytest.fixture
def described(monkeypatch):
    """What the compiler is told of the next segment."""
    torch.tpu.init()
    from tpu_backend.runtime import compiler

    seen, compile_now = [], compiler._compile
    monkeypatch.setattr(compiler, "_compile", lambda *some: (seen.append(some[0]), compile_now(*some))[1])
    return seen


def test_a_kernel_is_chosen_by_the_platform_that_is_lowered_for(described, monkeypatch):
    from tpu_backend.runtime.compiler import lower_segment
    from tpu_backend.runtime.target import Target, target_of

    kernel = replace(registry.TABLE["log1p"], on={"cuda": lambda self: self * 5})
    monkeypatch.setitem(registry.TABLE, "log1p", kernel)
    x = torch.rand(17, 3)
    assert torch.allclose(x.to("tpu").log1p().cpu(), x.log1p())
    here = target_of(0)
    text = {
        platform: lower_segment(described[-1], Target(platform, here.device))[0].as_text()
        for platform in ("cpu", "cuda")
    }
    assert "log_plus_one" in text["cpu"]
    assert "log_plus_one" not in text["cuda"]
    assert "multiply" in text["cuda"]
    assert lowered_for() is None


def test_an_unknown_platform_is_refused_where_a_lowering_is_registered():
    with pytest.raises(ValueError, match=r"on=\['gpu'\]: expected platforms among tpu, cuda, cpu"):
        registry.lowering("test_target", on={"gpu": abs})


def test_what_is_lowered_for_ends_with_its_block():
    with lowering_for("tpu"):
        with lowering_for("cuda"):
            assert lowered_for() == "cuda"
        assert lowered_for() == "tpu"
    assert lowered_for() is None


def test_programs_for_two_targets_have_two_keys(described):
    from tpu_backend.runtime.program_key import key_of_tape
    from tpu_backend.runtime.target import Target, target_of

    (torch.ones(19, device="tpu") * 3).cpu()
    here = target_of(0)
    keys = {key_of_tape(described[-1], None, Target(name, here.device)) for name in ("cpu", "cuda", "tpu")}
    assert len(keys) == 3
    assert key_of_tape(described[-1], None, here) in keys
