"""Numbers among an operator's arguments: exact where integers are computed, refused where they do not fit."""

import pytest
import torch
import torch.nn.functional as F

from tests.backend.number_grid import DTYPES, ELEMENTS, NUMBERS, OPERANDS, differences

EXACT = 1e9 + 7  # float32 has 1e9
INF = float("inf")


def on_both(call):
    return call("tpu").cpu().tolist(), call("cpu").tolist()


@pytest.mark.parametrize(
    "call",
    [
        lambda p: torch.full((2,), EXACT, dtype=torch.int64, device=p),
        lambda p: torch.arange(4, device=p).masked_fill(torch.arange(4, device=p) > 1, EXACT),
        lambda p: torch.arange(4, device=p).index_fill(0, torch.tensor([1], device=p), EXACT),
        lambda p: torch.arange(4, device=p).scatter(0, torch.tensor([1], device=p), EXACT),
        lambda p: F.pad(torch.arange(4, device=p), (1, 1), value=2**24 + 1),
        lambda p: torch.linspace(0, EXACT, 2, dtype=torch.int64, device=p),
        lambda p: F.threshold(torch.arange(4, device=p), 2, EXACT),
        lambda p: torch.addcmul(*[torch.arange(4, device=p)] * 3, value=EXACT),
        lambda p: torch.full((2,), 1e-60, dtype=torch.bool, device=p),
    ],
    ids=["full", "masked_fill", "index_fill", "scatter", "pad", "linspace", "threshold", "addcmul", "bool"],
)
def test_a_float_reaches_integers_exactly(call):
    ours, theirs = on_both(call)
    assert ours == theirs


def test_an_assigned_float_reaches_integers_exactly():
    x = torch.zeros(3, dtype=torch.int64, device="tpu")
    x[1] = EXACT
    assert x.tolist() == [0, 1_000_000_007, 0]


@pytest.mark.parametrize("number", [2**53 + 1, 1e40, float("nan")])
def test_a_number_that_integers_cannot_hold_is_refused_at_the_call(number):
    with pytest.raises(RuntimeError, match=r"^value cannot be converted to type int without overflow$"):
        torch.full((2,), number, dtype=torch.int32, device="tpu")


def test_a_number_that_float16_cannot_hold_is_refused():
    half = torch.zeros(2, dtype=torch.float16, device="tpu")
    with pytest.raises(RuntimeError, match="cannot be converted to type c10::Half without overflow"):
        half.masked_fill(half == 0, -1e9)
    assert half.masked_fill(half == 0, float("-inf")).tolist() == [float("-inf")] * 2
    assert half.masked_fill(half == 0, -65504).tolist() == [-65504] * 2


def test_a_number_that_is_written_nowhere_need_not_fit():
    bytes_ = torch.tensor([1, 2], dtype=torch.uint8, device="tpu")
    nowhere = torch.tensor([], dtype=torch.int64, device="tpu")
    assert bytes_.scatter(0, nowhere, 300).tolist() == [1, 2]
    assert bytes_.scatter(0, nowhere, 300, reduce="add").tolist() == [1, 2]
    assert F.pad(bytes_, (-1, 0), value=300).tolist() == [2]
    for call in (
        lambda: bytes_.scatter(0, nowhere.new_zeros(1), 300),
        lambda: F.pad(bytes_, (-1, 1), value=300),
        lambda: bytes_.index_fill(0, nowhere, 300),  # which the CPU looks at in any case
    ):
        with pytest.raises(RuntimeError, match="uint8_t without overflow"):
            call()


@pytest.mark.parametrize("fill", [torch.Tensor.masked_fill, torch.Tensor.masked_fill_])
def test_a_number_in_a_tensor_of_the_devices_must_fit(fill):
    def outcome(place, dtype, number):
        x = torch.zeros(3, dtype=dtype, device=place)
        mask = torch.tensor([True, False, False], device=place)
        try:
            return fill(x, mask, torch.tensor(number, device=place)).tolist()
        except RuntimeError as error:
            return str(error).partition("\n")[0]

    refused = 0
    for dtype in (torch.uint8, torch.int8, torch.float16):
        for number in (256.0, -1, -1.0, 300, -300, 7e4, INF):
            ours, theirs = outcome("tpu", dtype, number), outcome("cpu", dtype, number)
            assert ours == theirs, (dtype, number)
            refused += isinstance(theirs, str)
    assert refused == 12


def test_a_number_in_a_tensor_of_the_devices_that_fills_by_index_must_fit():
    x, index = torch.zeros(3, dtype=torch.int8, device="tpu"), torch.tensor([1], device="tpu")
    assert x.index_fill(0, index, torch.tensor(100.0, device="tpu")).tolist() == [0, 100, 0]
    with pytest.raises(RuntimeError, match="int8_t without overflow"):
        x.index_fill(0, index, torch.tensor(128.0, device="tpu")).tolist()
    with pytest.raises(RuntimeError, match="complex Scalar to non-complex"):
        x.index_fill(0, index, torch.tensor(2j, device="tpu"))


@pytest.mark.parametrize("scan", [torch.cumsum, torch.cumprod])
def test_a_running_result_of_truth_values_is_refused(scan):
    x = torch.tensor([True, False, True], device="tpu")
    with pytest.raises(NotImplementedError, match="not implemented for 'Bool'"):
        scan(x, 0, out=torch.empty_like(x))
    assert scan(x, 0).tolist() == ([1, 1, 2] if scan is torch.cumsum else [1, 0, 0])


def test_the_check_is_of_each_call_and_makes_no_programs():
    """The value is no part of the signature: a first call that fits says nothing of the next."""
    x = torch.zeros(3, dtype=torch.int8, device="tpu")
    x.tolist()  # so that what makes it is a program of its own
    x.fill_(1.0).tolist()
    before = torch.tpu.compile_stats()["compilations"]
    for number in (2.0, 100.0, -128.0):
        assert x.fill_(number).tolist() == [int(number)] * 3
    with pytest.raises(RuntimeError, match="int8_t without overflow"):
        x.fill_(128.0)
    assert x.tolist() == [-128] * 3
    assert torch.tpu.compile_stats()["compilations"] == before


def test_each_number_of_a_list_must_fit_its_own_tensor():
    tensors = [torch.ones(2, dtype=dtype, device="tpu") for dtype in (torch.float32, torch.float16)]
    assert torch._foreach_clamp_max(tensors, [1e6, 0.5])[1].tolist() == [0.5, 0.5]
    with pytest.raises(RuntimeError, match="c10::Half without overflow"):
        torch._foreach_clamp_max(tensors, [0.5, 1e6])


@pytest.mark.parametrize(
    "divide", [torch.floor_divide, torch.remainder, torch.fmod], ids=lambda f: f.__name__
)
def test_a_divisor_that_wraps_to_zero_is_refused(divide):
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        divide(torch.ones(2, dtype=torch.uint8, device="tpu"), 256)


@pytest.mark.parametrize(
    "divide", [torch.floor_divide, torch.remainder, torch.fmod], ids=lambda f: f.__name__
)
def test_a_divisor_on_the_device_that_is_zero_is_found(divide):
    result = divide(torch.ones(2, dtype=torch.uint8, device="tpu"), torch.zeros((), dtype=int, device="tpu"))
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        result.cpu()


_FEW = ("full", "full of one", "scalar_tensor", "x[index] =", "masked_fill of a tensor", "clamp", "where")


def test_elements_are_those_of_the_cpu():
    calls = {name: ELEMENTS[name] for name in _FEW}
    numbers = (300, 2**53 + 1, 1e9 + 7, -3.0, 131008.0, 1e40, float("nan"))
    assert differences(calls, (torch.uint8, torch.int64, torch.float16), numbers) == []


def test_operands_are_those_of_the_cpu():
    calls = {name: OPERANDS[name] for name in ("add", "add, alpha", "addcmul", "lt", "foreach add")}
    assert differences(calls, (torch.int32, torch.float16), (300, 2**31, 131008.0, 0.5)) == []


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [*ELEMENTS, *OPERANDS])
def test_every_number_is_taken_as_on_the_cpu(name, dtype):
    assert differences({name: {**ELEMENTS, **OPERANDS}[name]}, (dtype,), NUMBERS) == []


# ---- dtypes and values that the CPU's kernels have otherwise than PyTorch's meta kernels, or the formula


def _tensor(place, values, dtype=torch.float32):
    return torch.tensor(values, dtype=dtype, device=place)


# Since torch 2.14 the CPU has no power of a bcomplex32.
EXPONENTS = torch.float32 if hasattr(torch, "bcomplex32") else torch.bfloat16

AS_ON_THE_CPU = {
    "sum into integers": lambda p: torch.sum(
        _tensor(p, [-0.5, -0.5, 2.0]), 0, out=_tensor(p, 0, torch.int16)
    ),
    "prod into integers": lambda p: torch.prod(_tensor(p, [2.5, 2.5]), 0, out=_tensor(p, 0, torch.int64)),
    "cumsum into integers": lambda p: torch.cumsum(_tensor(p, [1.5, 1.5]), 0, out=_tensor(p, [0, 0], int)),
    "sum of integers into floats": lambda p: torch.sum(_tensor(p, [2**62] * 3, int), 0, out=_tensor(p, 0.0)),
    "mean into doubles": lambda p: torch.mean(_tensor(p, [5, 1.5]), 0, out=_tensor(p, 0, torch.float64)),
    "softmax of a number": lambda p: torch.softmax(_tensor(p, float("nan")), -1),
    "log_softmax of a number": lambda p: torch.log_softmax(_tensor(p, float("inf")), -1),
    "addmm, alpha=0": lambda p: torch.addmm(
        _tensor(p, [[1.0]]), _tensor(p, [[float("nan")]]), _tensor(p, [[1.0]]), alpha=0
    ),
    "int16 beside float16": lambda p: _tensor(p, [32767], torch.int16) - _tensor(p, [32768.0], torch.float16),
    "arange keeps a shape": lambda p: torch.arange(1, 4, out=_tensor(p, [[0], [0], [0]], int)),
    "lgamma is 0 at 1 and 2": lambda p: torch.lgamma(_tensor(p, [1, 2], torch.uint8)).bool(),
    "entr at 0 has no sign": lambda p: torch.atan2(torch.special.entr(_tensor(p, [0.0])), _tensor(p, [-1.0])),
    "arange from 0 keeps a shape": lambda p: torch.arange(3, out=_tensor(p, [[0], [0], [0]], int)),
    "linspace keeps a shape": lambda p: torch.linspace(0, 2, 4, out=_tensor(p, [[0.0, 0.0], [0.0, 0.0]])),
    "logspace keeps a shape": lambda p: torch.logspace(0, 2, 2, out=_tensor(p, [[0.0, 0.0]])),
    "angle of -0": lambda p: torch.angle(_tensor(p, [-0.0, 0.0, -1.0, float("nan")])),
    "all of complex numbers": lambda p: torch.all(_tensor(p, [1j, 1.0], torch.complex64), 0),
    "any of complex numbers": lambda p: torch.any(_tensor(p, [0, 1j], torch.complex64)),
    "a mask of complex numbers": lambda p: _tensor(p, [0, 1j], torch.complex64).bool(),
    "ldexp, large": lambda p: torch.ldexp(
        _tensor(p, [63, -126], torch.int8), _tensor(p, [63, 126], torch.int8)
    ),
    "ldexp of the least": lambda p: torch.ldexp(_tensor(p, [2.0**-100, 3.0]), _tensor(p, [200, -200], int)),
    "ldexp by bfloat16": lambda p: torch.ldexp(_tensor(p, [2, 3], int), _tensor(p, 0.5, torch.bfloat16)),
    "ldexp of complex numbers by -inf": lambda p: torch.ldexp(
        _tensor(p, [7 + 1j, 1j], torch.complex64), _tensor(p, [-INF, -1.0], EXPONENTS)
    ),
    "the largest of NaN with a sign": lambda p: (
        torch.topk(torch.copysign(_tensor(p, [float("nan"), INF, 1.0]), _tensor(p, [-1.0, 1.0, 1.0])), 2)[0]
    ),
    "huber_loss of two dtypes": lambda p: F.huber_loss(
        _tensor(p, [1.0, 4]), _tensor(p, [2.0, 3], torch.float64)
    ),
    "floor_divide of 16 bit": lambda p: _tensor(p, [1.5, 3, 7], torch.bfloat16) // 0.3,
    "0 // a number that 16 bit cannot hold": lambda p: _tensor(p, [0.0, 1], torch.half) // 1e-9,
    "index_add of masks": lambda p: _tensor(p, [True, False], torch.bool).index_add(
        0, torch.tensor([0, 1], device=p), _tensor(p, [True, True], torch.bool), alpha=-1
    ),
    "clamp by a complex number": lambda p: torch.clamp(_tensor(p, [0.0, 2.0]), min=0.5 + 0j),
    "arange by a complex number": lambda p: torch.arange(1, 3, 0.5 + 0j, device=p),
    "roots of 16 bit": lambda p: _tensor(p, [-INF, INF, -1.0, 0.0, -0.0, 4], torch.half) ** 0.5,
    "inverse roots of 16 bit": lambda p: _tensor(p, [-INF, INF, -1.0, 0.0, -0.0, 4], torch.half) ** -0.5,
    "roots of bfloat16": lambda p: _tensor(p, [-INF, INF, -0.0, 4], torch.bfloat16) ** -0.5,
    "cross entropy of 16 bit beside float32": lambda p: F.binary_cross_entropy_with_logits(
        _tensor(p, [1.0, 2], torch.half), _tensor(p, [0.0, 1])
    ),
    "a truncated quotient": lambda p: torch.div(
        _tensor(p, [[2.5], [7.0]]), _tensor(p, [0.001, 3.0, 256.0]), rounding_mode="trunc"
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("name", AS_ON_THE_CPU)
def test_dtypes_and_values_are_those_of_the_cpu(name):
    ours, theirs = AS_ON_THE_CPU[name]("tpu"), AS_ON_THE_CPU[name]("cpu")
    assert ours.dtype == theirs.dtype
    torch.testing.assert_close(ours.cpu(), theirs, rtol=2e-7, atol=0, equal_nan=True)


RESIZED = {
    "ge": lambda x, out: torch.ge(x, x, out=out.bool()),
    "floor_divide": lambda x, out: torch.floor_divide(x, x, out=out),
    "where": lambda x, out: torch.where(x > 0, x, x, out=out),
    "sort": lambda x, out: torch.sort(x, out=(out, out.long()))[0],
    "gelu": lambda x, out: torch.ops.aten.gelu.out(x, out=out),
    "mse_loss": lambda x, out: torch.ops.aten.mse_loss.out(x, x, 0, out=out),
    "sum": lambda x, out: torch.sum(x, -1, out=out),
    "cat": lambda x, out: torch.cat([x, x], out=out),
    "matmul": lambda x, out: torch.matmul(x, x.mT, out=out),
    "index_select": lambda x, out: torch.index_select(x, 0, torch.tensor([0], device=x.device), out=out),
}


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("name", RESIZED)
def test_a_resized_result_has_the_strides_of_a_new_one(name):
    def strides(place):
        x = torch.arange(24.0, device=place).reshape(2, 3, 4).permute(2, 0, 1)
        return RESIZED[name](x, torch.ones(5, device=place)).stride()

    assert strides("tpu") == strides("cpu")
