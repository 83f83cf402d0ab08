"""Debug mode: an error says where, a NaN says from which op, each op has finished when its call returns."""

import inspect

import pytest
import torch
from torch.nn import functional as F

from tests.backend.fresh_process import run_python


def _line() -> int:
    return inspect.currentframe().f_back.f_lineno


def test_the_first_op_that_makes_a_nan_is_named_with_shapes_and_line():
    x = torch.tensor([[1.0, -1.0]], device="tpu")
    with torch.tpu.eager_mode("debug", check_nans=True):
        y = x * 2
        with pytest.raises(RuntimeError) as caught:
            y.log()
        line = _line() - 1
    message = str(caught.value)
    assert message.startswith("aten::log(self=float32[1, 2]) made a NaN at ")
    assert f"test_debug_mode.py:{line}: " in message
    assert message.endswith(": y.log()")


def test_infinities_and_integers_are_no_nans():
    with torch.tpu.eager_mode("debug", check_nans=True):
        x = torch.zeros(2, device="tpu")
        assert torch.equal((1 / x).cpu(), torch.full((2,), float("inf")))
        assert (x.long() + 1).sum().item() == 2


def test_nans_in_backward_are_found():
    x = torch.zeros(2, device="tpu", requires_grad=True)
    with torch.tpu.eager_mode("debug", check_nans=True):
        loss = (x.sqrt() * 0).sum()  # the gradient is 0 * inf
        with pytest.raises(RuntimeError, match=r"aten::\w+.*\(.*float32\[2\].*\) made a NaN at "):
            loss.backward()


def test_without_the_switch_a_nan_passes():
    x = torch.tensor([-1.0], device="tpu")
    with torch.tpu.eager_mode("debug"):
        assert x.log().isnan().item()
    with torch.tpu.eager_mode("debug", check_nans=True), torch.tpu.eager_mode("debug", check_nans=False):
        assert x.log().isnan().item()


def test_the_switch_ends_with_the_mode():
    with torch.tpu.eager_mode("debug", check_nans=True):
        pass
    with torch.tpu.eager_mode("debug"):
        assert torch.tensor([-1.0], device="tpu").log().isnan().item()


def test_other_modes_refuse_the_switch():
    with pytest.raises(
        ValueError, match="check_nans=True looks at every op, which mode 'fused' does not: use \"debug\""
    ):
        torch.tpu.eager_mode("fused", check_nans=True)


def test_the_environment_sets_mode_switch_and_log():
    done = run_python(
        """
        import torch
        assert torch.tpu.get_eager_mode() == "debug"
        x = torch.tensor([-1.0], device="tpu")
        try:
            x.log()
        except RuntimeError as error:
            print(error)
        """,
        TPU_EAGER_MODE="debug",
        TPU_DEBUG_NANS="1",
        TPU_LOGS="compile",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("aten::log(self=float32[1]) made a NaN at <string>:6: ")
    assert "[tpu tpu_backend.compile] compiled 1 op: aten::log" in done.stderr


def test_a_mode_that_is_none_is_named_at_the_first_use():
    done = run_python(
        """
        import torch
        torch.ones(2)
        try:
            torch.ones(2, device="tpu")
        except RuntimeError as error:
            print(error)
        """,
        TPU_EAGER_MODE="fast",
    )
    assert done.stdout == "TPU_EAGER_MODE='fast': expected one of debug, strict, fused\n"
    assert done.stderr == ""


def test_a_model_trains_in_debug_mode_with_the_check_on():
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3).to("tpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    inputs, labels = torch.randn(8, 4).to("tpu"), torch.arange(8).remainder(3).to("tpu")
    losses = []
    with torch.tpu.eager_mode("debug", check_nans=True):
        for _ in range(4):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses == sorted(losses, reverse=True)
