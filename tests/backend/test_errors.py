"""Errors: the CPU's type and words where arguments are wrong, and a device that goes on afterwards."""

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

WRONG: dict[str, Callable[[Callable[..., torch.Tensor]], object]] = {
    "shapes that do not broadcast": lambda t: t(3) + t(4),
    "matrix product": lambda t: t(2, 3) @ t(2, 3),
    "addmm": lambda t: torch.addmm(t(5), t(2, 3), t(3, 4)),
    "linear": lambda t: F.linear(t(2, 3), t(4, 5)),
    "bmm": lambda t: torch.bmm(t(2, 3, 4), t(3, 4, 5)),
    "dtypes of a matrix product": lambda t: t(2, 2) @ t(2, 2).double(),
    "view of the wrong size": lambda t: t(2, 3).view(7),
    "view of a transposed tensor": lambda t: t(2, 3).t().view(6),
    "reshape": lambda t: t(2, 3).reshape(4),
    "index out of range": lambda t: t(3)[5],
    "dimension out of range": lambda t: t(3).sum(2),
    "cat": lambda t: torch.cat([t(2, 3), t(2, 4)]),
    "stack": lambda t: torch.stack([t(2), t(3)]),
    "in place, a larger shape": lambda t: t(3).add_(t(2, 3)),
    "in place, another dtype": lambda t: t(3).int().add_(1.5),
    "in place on an expanded tensor": lambda t: t(1, 3).expand(2, 3).add_(1),
    "out of another dtype": lambda t: torch.add(t(3), t(3), out=t(3).int()),
    "negative size": lambda t: t(3).new_empty(-1),
    "item of many": lambda t: t(3).item(),
    "truth of many": lambda t: bool(t(3)),
    "softmax of integers": lambda t: t(3).int().softmax(0),
    "mean of integers": lambda t: t(3).int().mean(),
    "not of floats": lambda t: torch.bitwise_not(t(3)),
    "cross entropy": lambda t: F.cross_entropy(t(2, 3), t(4).long()),
    "embedding by floats": lambda t: F.embedding(t(2), t(3, 3)),
    "gather by floats": lambda t: torch.gather(t(3), 0, t(3)),
    "dropout probability": lambda t: F.dropout(t(3), 1.5),
    "layer norm": lambda t: F.layer_norm(t(2, 3), (4,)),
    "copy of another shape": lambda t: t(3).copy_(t(4)),
    "backward of many": lambda t: t(3).requires_grad_().mul(2).backward(),
    "leaf in place": lambda t: t(3).requires_grad_().mul_(2),
    "normal with a negative deviation": lambda t: t(3).normal_(0, -1),
    "uniform upside down": lambda t: t(3).uniform_(1, 0),
    "bernoulli of two": lambda t: t(3).bernoulli_(2.0),
    "randint upside down": lambda t: torch.randint(5, 1, (3,), device=t(1).device),
    "randperm of a negative number": lambda t: torch.randperm(-1, device=t(1).device),
    "arange the wrong way": lambda t: torch.arange(3, 1, device=t(1).device),
    "split": lambda t: t(4).split([1, 2]),
    "scatter": lambda t: t(3).scatter(0, t(3).long(), t(3).int()),
    "multinomial of too many": lambda t: torch.multinomial(t(3), 4),
}


def _failure(function: Callable[[Callable[..., torch.Tensor]], object], device: str) -> Exception:
    try:
        function(lambda *sizes: torch.ones(*sizes, device=device))
    except Exception as error:
        return error
    pytest.fail(f"{device} raises nothing")


# What PyTorch's shape inference calls otherwise than its CPU kernels do.
REWORDED = {
    "matrix product": r"a and b must have same reduction dim, but got \[2, 3\] X \[2, 3\]",
    "linear": r"a and b must have same reduction dim, but got \[2, 3\] X \[5, 4\]",
    "in place, another dtype": r"Promotion of int.add/sub_\(float\) in in-place ops are not possible",
}


def _words(error: Exception) -> set[str]:
    return set("".join(c if c.isalnum() else " " for c in str(error).splitlines()[0].lower()).split())


@pytest.mark.parametrize("mode", ["debug", "fused"])
def test_a_wrong_call_raises_what_the_cpu_raises(mode):
    different = []
    for name, function in WRONG.items():
        expected = _failure(function, "cpu")
        with torch.tpu.eager_mode(mode):
            try:
                function(lambda *sizes: torch.ones(*sizes, device="tpu"))
                different.append(f"{name}: nothing was raised, on the CPU: {expected}")
            except Exception as error:
                shared = len(_words(error) & _words(expected)) / len(_words(expected))
                alike = shared > 0.4 or (name in REWORDED and re.search(REWORDED[name], str(error)))
                if type(error) is not type(expected) or not alike:
                    different.append(f"{name}: {type(error).__name__}: {error}\n  on the CPU {expected!r}")
            torch.tpu.flush()
    assert not different, "\n".join(different)
    assert torch.ones(3, device="tpu").sum().item() == 3


def test_a_tensor_of_another_device_is_named():
    with pytest.raises(
        RuntimeError, match=r"found at least two devices, tpu:0 and cpu.*tensor.to\(\"tpu\"\)"
    ):
        torch.ones(3, device="tpu") + torch.ones(3)
    with pytest.raises(RuntimeError, match="two devices"):
        torch.ones(2, 3) @ torch.ones(3, 2, device="tpu")
    with pytest.raises(RuntimeError, match="two devices"):
        F.linear(torch.ones(2, 3, device="tpu"), torch.ones(3, 3))


def test_numpy_says_to_copy_first():
    with pytest.raises(
        TypeError, match=r"can't convert tpu:0 device type tensor to numpy. Use Tensor.cpu\(\)"
    ):
        torch.ones(2, device="tpu").numpy()


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_dtypes_that_do_not_exist_here_are_named():
    with pytest.raises(
        NotImplementedError, match="tpu tensors are not quantized; keep quantized ones on the CPU"
    ):
        torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.quint8).to("tpu")


# ---- failures inside the device ----------------------------------------------------------------------------


class BrokenError(Exception):
    pass


def _break(*_: object, **__: object) -> None:
    raise BrokenError("no such thing")


@pytest.fixture
def broken_lowering(monkeypatch):
    """The lowering of cosh raises; no other test uses these sizes, so that it is met for the first time."""
    from tpu_backend.lowering.registry import TABLE

    torch.tpu.init()
    monkeypatch.setitem(TABLE, "cosh", replace(TABLE["cosh"], function=_break))


@pytest.mark.parametrize(("mode", "size"), [("debug", 101), ("strict", 102), ("fused", 103)])
def test_a_lowering_that_fails_names_op_shapes_and_line_and_the_device_goes_on(
    mode, size, broken_lowering, monkeypatch
):
    x = torch.ones(size, device="tpu")
    with torch.tpu.eager_mode(mode):
        kept = x * 2
        with pytest.raises(
            RuntimeError,
            match=rf"aten::cosh\(self=float32\[{size}\]\) failed at .*test_errors.py:\d+.*BrokenError",
        ):
            torch.cosh(x)
        assert kept.sum().item() == 2 * size
    monkeypatch.undo()
    assert (x + 1).sum().item() == 2 * size


@pytest.mark.parametrize(("mode", "size"), [("debug", 104), ("strict", 105), ("fused", 106)])
def test_a_compilation_that_fails_spoils_its_own_results_only(mode, size, monkeypatch):
    from tpu_backend.runtime import compiler

    x = torch.ones(size, device="tpu")
    before = (x * 3).sum()
    assert before.item() == 3 * size
    with torch.tpu.eager_mode(mode):
        monkeypatch.setattr(compiler, "segment_function", _break)
        spoiled: list[torch.Tensor] = []

        def fail() -> None:
            spoiled.append(x - 5)
            torch.tpu.flush()

        with pytest.raises(RuntimeError, match="no such thing") as caught:
            fail()
        monkeypatch.undo()
        if mode == "debug":
            assert "aten::sub.Tensor" in str(caught.value)
            assert "test_errors.py" in str(caught.value)
        for tensor in spoiled:
            with pytest.raises(
                RuntimeError,
                match=r"no value: it was to be computed by a program that failed:\n.*no such thing",
            ):
                tensor.cpu()
            with pytest.raises(RuntimeError, match="no value"):
                tensor + 1
            tensor.fill_(4)  # a new value: the tensor is as good as ever
            assert tensor.sum().item() == 4 * size
        assert (x - 5).sum().item() == -4 * size
    assert before.item() == 3 * size


def test_ctrl_c_during_a_compilation_is_itself_and_loses_nothing(monkeypatch):
    from tpu_backend.runtime import compiler

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    x = torch.ones(107, device="tpu")
    y = x * 7
    y[3:] += 1
    with monkeypatch.context() as patched:
        patched.setattr(compiler, "segment_function", interrupted)
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                torch.tpu.flush()
    assert y.sum().item() == 7 * 107 + 104


def test_memory_that_cannot_be_had_is_an_out_of_memory_error():
    too_much = torch.empty(2**46, dtype=torch.uint8, device="tpu")  # nothing is written yet
    kept = [torch.ones(1000, 7, device="tpu") for _ in range(3)]  # the line that holds memory

    def fill(tensor: torch.Tensor = too_much) -> None:
        tensor.fill_(1)
        torch.tpu.synchronize()

    with pytest.raises(torch.OutOfMemoryError) as raised:
        fill()
    message = str(raised.value)
    assert "67,108,864.0 MiB      1 x uint8[70368744177664]  aten::fill_.Scalar at " in message
    assert re.search(r"3 x float32\[1000, 7\]  aten::\S+ at .*test_errors.py:\d+: kept = ", message), message
    assert torch.tpu.memory_summary().splitlines()[0] in message
    del too_much, kept
    assert torch.ones(3, device="tpu").sum().item() == 3


def test_an_error_in_backward_names_the_op_and_leaves_the_graph_usable(broken_lowering):
    """sinh's gradient calls cosh, on autograd's thread."""
    x = torch.ones(108, device="tpu", requires_grad=True)
    with pytest.raises(RuntimeError, match="aten::cosh"):
        x.sinh().sum().backward()
    assert x.grad is None
    x.square().sum().backward()
    assert x.grad.sum().item() == 216


def test_an_autograd_function_of_the_user_may_raise():
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            raise BrokenError("in backward")

    x = torch.ones(3, device="tpu", requires_grad=True)
    with pytest.raises(BrokenError, match="in backward"):
        Fails.apply(x).sum().backward()
    assert x.sum().item() == 3
