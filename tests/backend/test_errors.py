"""Errors: the CPU's type and words where arguments are wrong, and a device that goes on afterwards."""

import re
import warnings
from collections.abc import Callable
from dataclasses import replace

import jax
import pytest
import torch
from torch.nn import functional as F

from tests.backend.fresh_process import run_python
from tests.backend.ways import WAYS, run_as
from tpu_backend import _C, jax_op

_OVERLAPPING: dict[str, Callable[[Callable[..., torch.Tensor]], object]] = {
    "index_add_": lambda t: (x := t(3).long()).index_add_(0, x, t(3).long()),
    "index_copy_": lambda t: (x := t(3)).index_copy_(0, t(3).long(), x),
    "index_fill_": lambda t: (x := t(3).long()).index_fill_(0, x, 3),
    "scatter_": lambda t: (x := t(3)).scatter_(0, t(3).long(), x),
    "scatter_add_": lambda t: (x := t(3)).scatter_add_(0, t(3).long(), x),
    "put_": lambda t: (x := t(3)).put_(t(3).long(), x),
    "x[index] =": lambda t: (x := t(3).long()).__setitem__(x[:2], x[1:]),
    "gather": lambda t: torch.gather(x := t(3), 0, t(3).long(), out=x),
    "index_select": lambda t: torch.index_select(x := t(3), 0, t(3).long(), out=x),
}

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
    "copy of another shape from the host": lambda t: t(3).copy_(torch.ones(4)),
    "copy of a larger shape": lambda t: t(1).copy_(t(4)),
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
    "one-dimensional matrix product": lambda t: t(3) @ t(4),
    "dot": lambda t: torch.dot(t(3), t(4)),
    "mv": lambda t: torch.mv(t(2, 3), t(4)),
    "baddbmm": lambda t: torch.baddbmm(t(1), t(2, 3, 4), t(2, 5, 6)),
    "einsum": lambda t: torch.einsum("ij,jk->ik", t(2, 3), t(4, 5)),
    "attention": lambda t: F.scaled_dot_product_attention(t(1, 2, 3, 4), t(1, 2, 3, 5), t(1, 2, 3, 4)),
    "convolution of other channels": lambda t: F.conv2d(t(1, 2, 8, 8), t(4, 3, 3, 3)),
    "convolution of too little": lambda t: F.conv2d(t(1, 1, 2, 2), t(1, 1, 5, 5)),
    "transposed convolution": lambda t: F.conv_transpose2d(t(1, 2, 4, 4), t(3, 2, 3, 3)),
    "pooling of too little": lambda t: F.max_pool2d(t(1, 1, 2, 2), 5),
    "reflection of too little": lambda t: F.pad(t(1, 2), (3, 3), mode="reflect"),
    "pixel shuffle": lambda t: F.pixel_shuffle(t(1, 3, 2, 2), 2),
    "group norm": lambda t: F.group_norm(t(2, 3, 4), 2),
    "batch norm of one value": lambda t: F.batch_norm(t(1, 3), t(3), t(3), training=True),
    "masked_fill": lambda t: t(3).masked_fill(t(4) > 0, 1.0),
    "masked_fill by floats": lambda t: t(3).masked_fill(t(3), 1.0),
    "where": lambda t: torch.where(t(3) > 0, t(3), t(4)),
    "lerp": lambda t: t(3).lerp(t(4), 0.5),
    "topk of too many": lambda t: t(3).topk(5),
    "kthvalue of too many": lambda t: t(3).kthvalue(5),
    "largest of none": lambda t: t(0).max(),
    "largest of none, by dim": lambda t: t(0, 3).max(0),
    "place of the largest of none": lambda t: t(0).argmax(),
    "negative power of integers": lambda t: t(3).long() ** -1,
    "bits of floats": lambda t: t(3) & t(3),
    "complex number into floats": lambda t: t(3).add_(1j),
    "dim of softmax": lambda t: t(3).softmax(3),
    "dim of sort": lambda t: t(3).sort(1),
    "dim of flip": lambda t: t(3).flip(1),
    "roll": lambda t: t(3, 3).roll((1, 2), (0,)),
    "tril of a vector": lambda t: t(3).tril(),
    "gather of other dims": lambda t: t(3, 3).gather(0, t(4).long()),
    "index_add of other sizes": lambda t: t(3).index_add(0, t(2).long(), t(3)),
    "inverse of an oblong": lambda t: torch.linalg.inv(t(2, 3)),
    "Cholesky of an oblong": lambda t: torch.linalg.cholesky(t(2, 3)),
    "solve": lambda t: torch.linalg.solve(t(3, 3), t(2)),
    "quantile above one": lambda t: t(3).quantile(2.0),
    "interpolate": lambda t: F.interpolate(t(1, 1, 4), size=(2, 2)),
    "glu of an odd size": lambda t: F.glu(t(3)),
    "classes of int32": lambda t: F.nll_loss(t(3, 3), t(3).int()),
    "loss of probabilities": lambda t: F.binary_cross_entropy(t(3) * 0.5, t(4)),
    "index_add of other rows": lambda t: t(3, 2).index_add(0, t(2).long(), t(2)),
    "index_reduce of other rows": lambda t: t(3, 2).index_reduce(0, t(2).long(), t(2), "prod"),
    "index_select by floats": lambda t: t(3).index_select(0, t(1)),
    "negative padding": lambda t: F.conv3d(t(1, 1, 4, 4, 4), t(1, 1, 2, 2, 2), padding=-1),
    "rows of boundaries": lambda t: torch.bucketize(t(3), t(2, 2)),
    "masked_scatter by numbers": lambda t: t(3).masked_scatter(t(3).byte(), t(3)),
    "in place, a comparison of a larger shape": lambda t: t(1).ge_(t(2, 3)),
    "in place, a power of a larger shape": lambda t: t(1)[0].pow_(t(1, 0)),
    "index_reduce by a matrix": lambda t: t(1, 2).index_reduce(1, t(1, 2).long(), t(1, 2), "amin"),
    "median of none": lambda t: t(0, 3).median(0),
    "kthvalue of none": lambda t: t(0, 3).kthvalue(1, 0),
    "adaptive mean of none": lambda t: F.adaptive_avg_pool1d(t(2, 0), 2),
    # out= of another dtype
    "neg into doubles": lambda t: torch.neg(t(3), out=t(3).double()),
    "clamp into floats": lambda t: torch.clamp(t(3).int(), 0, 1, out=t(3)),
    "clamp into another shape": lambda t: torch.clamp(t(3), 0, 1, out=t(2).double()),
    "any into floats": lambda t: torch.any(t(3), out=t(1)[0]),
    "amax into doubles": lambda t: torch.amax(t(3), 0, out=t(1)[0].double()),
    "tril into integers": lambda t: torch.tril(t(2, 2), out=t(2, 2).long()),
    # of shared memory
    **{f"{name} of itself": call for name, call in _OVERLAPPING.items()},
    # of two dtypes
    "probabilities": lambda t: F.binary_cross_entropy(t(3) * 0.5, t(3).double()),
    "weights of classes": lambda t: F.cross_entropy(t(3, 4), t(3).long(), weight=t(4).double()),
    "parameters of layer norm": lambda t: F.layer_norm(t(2, 3), (3,), t(3).half(), t(3).half()),
    "parameters of group norm": lambda t: F.group_norm(t(2, 4, 3), 2, t(4).bfloat16(), t(4).bfloat16()),
    "parameters of batch norm": lambda t: F.batch_norm(t(2, 3), t(3), t(3), t(3).half(), t(3).half()),
    "bias of a linear layer": lambda t: F.linear(t(2, 3), t(4, 3), t(4).double()),
    "bias of a transposed convolution": lambda t: F.conv_transpose3d(
        t(1, 2, 3, 3, 3), t(2, 2, 2, 2, 2), t(2).double()
    ),
    "what is put at an index": lambda t: t(3).index_put_((t(1).long(),), t(1).double()),
    "what is put at a mask": lambda t: t(3).__setitem__(t(3) > 0, t(3).double()),
    "what is added at an index": lambda t: t(3).index_add_(0, t(1).long(), t(1).double()),
    "what is copied to an index": lambda t: t(3).index_copy_(0, t(1).long(), t(1).double()),
    "grid": lambda t: F.grid_sample(t(1, 1, 3, 3), t(1, 2, 2, 2).double(), align_corners=False),
    "weights of a bag": lambda t: F.embedding_bag(
        t(1, 2).long(), t(3, 2), per_sample_weights=t(1, 2).double(), mode="sum"
    ),
}


def _failure(function: Callable[[Callable[..., torch.Tensor]], object], device: str) -> Exception:
    try:
        function(lambda *sizes: torch.ones(*sizes, device=device))
    except Exception as error:
        return error
    pytest.fail(f"{device} raises nothing")


def _words(error: Exception) -> str:
    return str(error).splitlines()[0].replace("tpu", "cpu")


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
                if type(error) is not type(expected) or _words(error) != _words(expected):
                    different.append(f"{name}: {type(error).__name__}: {error}\n  on the CPU {expected!r}")
            torch.tpu.flush()
    assert not different, "\n".join(different)
    assert torch.ones(3, device="tpu").sum().item() == 3


def test_what_is_refused_is_refused_in_a_compiled_graph_too():
    def normalize(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x * 2, (3,), weight, weight) + 1

    compiled = torch.compile(normalize, backend="tpu")
    arguments = torch.ones(2, 3), torch.ones(3).half()
    for function, device in ((normalize, "cpu"), (compiled, "tpu")):
        with pytest.raises(RuntimeError, match="mixed dtype"):
            function(*(each.to(device) for each in arguments))


def test_one_number_at_a_mask_is_of_any_dtype_and_stays_on_the_device():
    before = torch.tpu.fallback_stats()
    for value in (torch.tensor(float("-inf")), torch.tensor(float("-inf"), device="tpu")):
        scores = torch.zeros(3, device="tpu", dtype=torch.bfloat16)
        scores[torch.tensor([True, False, True], device="tpu")] = value
        assert scores.tolist() == [float("-inf"), 0, float("-inf")]
    assert torch.tpu.fallback_stats() == before


def test_an_input_that_would_be_resized_as_the_result_is_refused():
    x = torch.ones(4, 6, device="tpu")
    for call in (lambda: torch.cat((x, x), out=x), lambda: torch.mm(x, x.t(), out=x)):
        with pytest.raises(RuntimeError, match="written-to tensor refer to a single memory location"):
            call()
    assert x.sum().item() == 24


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
def test_a_lowering_that_fails_names_op_shapes_and_line_and_the_cpu_computes(
    mode, size, broken_lowering, monkeypatch
):
    x = torch.ones(size, device="tpu")
    failure = rf"aten::cosh\(self=float32\[{size}\]\) failed at .*test_errors.py:\d+.*BrokenError"
    with torch.tpu.eager_mode(mode):
        kept = x * 2
        with pytest.warns(UserWarning, match=failure):
            result = torch.cosh(x)
        assert torch.equal(result.cpu(), torch.cosh(torch.ones(size)))
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


def test_memory_that_cannot_be_had_is_an_out_of_memory_error(monkeypatch):
    too_much = torch.empty(2**46, dtype=torch.uint8, device="tpu")  # nothing is written yet
    kept = [torch.ones(1000, 7, device="tpu") for _ in range(3)]  # the line that holds memory

    def fill(tensor: torch.Tensor = too_much) -> None:
        tensor.fill_(1)
        torch.tpu.synchronize()

    monkeypatch.setattr(_C, "compile_stats", lambda _: {"segments_in_parts": 0})
    with pytest.raises(torch.OutOfMemoryError) as raised:
        fill()
    message = str(raised.value)
    assert "67,108,864.0 MiB      1 x uint8[70368744177664]  aten::fill_.Scalar at " in message
    assert re.search(r"3 x float32\[1000, 7\]  aten::\S+ at .*test_errors.py:\d+: kept = ", message), message
    assert torch.tpu.memory_summary().splitlines()[0] in message
    assert "needs less" not in message
    monkeypatch.setattr(_C, "compile_stats", lambda _: {"segments_in_parts": 1})
    with pytest.raises(torch.OutOfMemoryError) as raised:
        fill()
    assert str(raised.value).endswith("needs less: docs/execution.md")
    monkeypatch.undo()
    del too_much, kept
    assert torch.ones(3, device="tpu").sum().item() == 3


def test_a_read_of_a_program_without_memory_is_an_out_of_memory_error_too():
    """The result that is read is small, another one of the same program has no place."""
    done = run_python(
        """
        import resource, torch
        resource.setrlimit(resource.RLIMIT_AS, (40 * 2**30, 40 * 2**30))
        x = torch.randn(2**36, device="tpu")
        try:
            print(x[5].item())
        except torch.OutOfMemoryError as error:
            print("refused:", str(error).splitlines()[0])
        print(torch.ones(3, device="tpu").sum().item())
        """
    )
    assert "refused: " in done.stdout, done.stderr
    assert done.stdout.endswith("3.0\n")


def test_a_program_without_memory_whose_indices_are_checked_is_an_out_of_memory_error_too():
    """What it would have found of its indices never comes, and must not be waited for."""
    done = run_python(
        """
        import resource, torch
        resource.setrlimit(resource.RLIMIT_AS, (40 * 2**30, 40 * 2**30))
        x = torch.arange(10, device="tpu")
        torch.tpu.synchronize()
        y = x[torch.tensor([1, 2], device="tpu")]
        z = torch.randn(2**36, device="tpu")
        try:
            print(y.tolist(), z[5].item())
        except torch.OutOfMemoryError as error:
            print("refused:", str(error).splitlines()[0])
        print(torch.ones(3, device="tpu").sum().item())
        """,
        timeout=120,
    )
    assert "refused: " in done.stdout, done.stderr
    assert done.stdout.endswith("3.0\n")


def test_a_lowering_that_fails_in_backward_is_named_and_the_cpu_computes(broken_lowering):
    """sinh's gradient calls cosh, on autograd's thread."""
    x = torch.ones(108, device="tpu", requires_grad=True)
    with pytest.warns(UserWarning, match="aten::cosh.*BrokenError"):
        x.sinh().sum().backward()
    assert torch.equal(x.grad.cpu(), torch.cosh(torch.ones(108)))


@pytest.mark.parametrize(
    ("error", "size", "stays"), [(MemoryError, 114, False), (OSError, 115, False), (TypeError, 116, True)]
)
def test_only_a_failure_of_the_form_itself_keeps_it_on_the_cpu(error, size, stays, monkeypatch):
    from tpu_backend.lowering.registry import TABLE

    def fails(*_: object, **__: object) -> None:
        raise error("for the test")

    x = torch.ones(size, device="tpu")
    fails.__module__ = TABLE["cosh"].function.__module__  # that of a lowering, and no function of the user's
    with monkeypatch.context() as patched:
        patched.setitem(TABLE, "cosh", replace(TABLE["cosh"], function=fails))
        with pytest.warns(UserWarning, match=f"{error.__name__}: for the test"):
            torch.cosh(x)
    before = torch.tpu.fallback_stats()["aten::cosh"]
    with warnings.catch_warnings(action="ignore"):
        torch.testing.assert_close(torch.cosh(x).cpu(), torch.cosh(torch.ones(size)))
    assert torch.tpu.fallback_stats()["aten::cosh"] == before + stays


def test_a_function_that_raised_once_runs_on_the_device_the_next_time():
    calls: list[bool] = []

    @jax_op
    def fails_once(x: jax.Array) -> jax.Array:
        calls.append(isinstance(x, jax.core.Tracer))
        if len(calls) == 2:  # the first tells the shapes
            raise TypeError("for the test")
        return x * 2

    x = torch.ones(3, device="tpu")
    with pytest.warns(UserWarning, match="TypeError: for the test"):
        assert fails_once(x).tolist() == [2.0] * 3
    before = torch.tpu.fallback_stats()
    assert fails_once(x).tolist() == [2.0] * 3
    assert torch.tpu.fallback_stats() == before


@pytest.mark.parametrize("way", WAYS)
def test_what_c_plus_plus_raises_at_a_launch_leaves_nothing_pending(way, monkeypatch):
    """pybind11's own exception: what came back from Python is of another type."""
    from tpu_backend.runtime import ahead, compiler

    def write() -> None:
        for _ in range(130):  # equal parts
            x.cosh_().tanh_()
        x.cpu()

    compile_now = compiler._compile
    monkeypatch.setattr(ahead, "result", lambda *_: None)
    x = torch.ones(117, device="tpu")
    torch.tpu.flush()
    with run_as(way):
        with monkeypatch.context() as patched:
            patched.setattr(
                compiler, "_compile", lambda *some: replace(compile_now(*some), is_padded=object())
            )
            with pytest.raises(RuntimeError, match="cast"):
                write()
        with pytest.raises(RuntimeError, match="no value: it was to be computed by a program that failed"):
            x.cpu()
        x.fill_(3)
        assert (x + 1).sum().item() == 4 * 117


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


def test_a_number_that_is_refused_spoils_no_other_call():
    x = torch.empty(111, device="tpu")
    before = torch.tpu.fallback_stats()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="std"):
            x.normal_(0, -1)
        x.normal_(0, 1)
    assert x.isfinite().all().item()
    assert torch.tpu.fallback_stats() == before
