"""Integers and booleans: computed as on the CPU, and refused where the CPU refuses them."""

import itertools
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from tpu_backend.lowering import TABLE, functional_name
from tpu_backend.lowering.kinds import KINDS, is_of_kind
from tpu_backend.lowering.registry import is_16_bit
from tpu_backend.runtime.dtypes import jax_dtype

INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]


def outcome(call, place: str):
    try:
        return call(place).cpu().tolist()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"


# ---- powers


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
@pytest.mark.parametrize("exponent", [0, 3, 17, 63, 64, 100, 127, 300, -1])
def test_a_power_of_integers_wraps_as_on_the_cpu(dtype, exponent):
    def power(place):
        return torch.tensor([0, 1, 2, 3, 7, -1]).to(dtype).to(place) ** exponent

    assert outcome(power, "tpu") == outcome(power, "cpu")


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_a_tensor_of_exponents_counts_with_all_its_bits(dtype):
    largest = torch.iinfo(dtype).max
    exponents = torch.tensor([0, 1, 64, 65, 66, 127, largest]).to(dtype)
    bases = torch.tensor([3, -1, 2, 1, 5, 7, 9]).to(dtype)
    assert torch.equal((bases.to("tpu") ** exponents.to("tpu")).cpu(), bases**exponents)
    assert torch.equal((3 ** exponents.to("tpu")).cpu(), 3**exponents)


def test_a_negative_exponent_leaves_one_and_minus_one():
    bases, exponents = torch.tensor([1, -1, -1, 2, -5]), torch.tensor([-7, -2, -3, -1, -64])
    assert torch.equal((bases.to("tpu") ** exponents.to("tpu")).cpu(), bases**exponents)


# ---- bytes and 16 bit


@pytest.mark.parametrize("antialias", [False, True])
@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@pytest.mark.parametrize(("channels", "size"), [(3, (5, 11)), (1, (20, 3)), (5, (9, 8))])
def test_bytes_are_interpolated_as_on_the_cpu(mode, antialias, channels, size):
    image = torch.randint(0, 256, (2, channels, 9, 8), generator=torch.Generator().manual_seed(0))
    image = image.to(torch.uint8)
    expected = F.interpolate(image, size=size, mode=mode, antialias=antialias)
    assert torch.equal(
        F.interpolate(image.to("tpu"), size=size, mode=mode, antialias=antialias).cpu(), expected
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_infinity_becomes_the_largest_number_of_its_own_dtype(dtype):
    values = torch.tensor([float("inf"), float("-inf"), float("nan"), 2.5], dtype=dtype)
    assert torch.equal(torch.nan_to_num(values.to("tpu")).cpu(), torch.nan_to_num(values))


# ---- what PyTorch refuses

REFUSED = {
    "arange of bool": lambda p: torch.arange(1, 7, 2, dtype=torch.bool, device=p),
    "arange into complex numbers": lambda p: torch.arange(3, out=torch.full((3,), 1j, device=p)),
    "trace of a mask": lambda p: torch.trace(torch.ones(2, 2, device=p).bool()),
    "masks, alpha of a float": lambda p: torch.add(*[torch.ones(2, device=p).bool()] * 2, alpha=-1.0),
    "floats, alpha of a bool": lambda p: torch.add(*[torch.ones(2, device=p)] * 2, alpha=True),
    "hardtanh of bytes below 0": lambda p: F.hardtanh(torch.ones(2, dtype=torch.uint8, device=p)),
    "addcmul of masks": lambda p: torch._foreach_addcmul(*[[torch.ones(2, device=p).bool()]] * 3, 2)[0],
    "a mean of masks": lambda p: (
        torch.ones(2, device=p)
        .bool()
        .scatter_reduce(0, torch.tensor([0, 1], device=p), torch.ones(2, device=p).bool(), "mean")
    ),
    "a mean of no masks": lambda p: (
        torch.ones(2, device=p)
        .bool()
        .scatter_reduce(0, torch.tensor([], device=p).long(), torch.ones(0, device=p).bool(), "mean")
    ),
    "cross entropy of integer logits": lambda p: F.binary_cross_entropy_with_logits(
        torch.arange(2, device=p), torch.ones(2, device=p)
    ),
    "a power beyond 16 bit": lambda p: torch.ones(2, dtype=torch.half, device=p) ** 2**31,
    "det of 16 bit": lambda p: torch.linalg.det(torch.eye(3, dtype=torch.half, device=p)),
    "std": lambda p: torch.arange(4, device=p).std(),
    "var_mean": lambda p: torch.var_mean(torch.arange(4, device=p))[0],
    "lerp": lambda p: torch.lerp(*[torch.arange(4, device=p)] * 2, 0.5),
    "gelu": lambda p: F.gelu(torch.arange(4, device=p)),
    "softplus": lambda p: F.softplus(torch.arange(4, device=p)),
    "hypot": lambda p: torch.hypot(*[torch.arange(4, device=p)] * 2),
    "mse_loss": lambda p: F.mse_loss(*[torch.arange(4, device=p)] * 2),
    "avg_pool2d": lambda p: F.avg_pool2d(torch.ones(1, 4, 4, dtype=torch.int32, device=p), 2),
    "adaptive_avg_pool2d": lambda p: F.adaptive_avg_pool2d(torch.ones(1, 4, 4, dtype=int, device=p), 2),
    "interpolate": lambda p: F.interpolate(torch.ones(1, 1, 4, 4, dtype=int, device=p), size=(2, 2)),
    "byte - True": lambda p: torch.ones(2, dtype=torch.uint8, device=p) - True,
    "True - byte": lambda p: True - torch.ones(2, dtype=torch.uint8, device=p),
    "byte - mask": lambda p: torch.ones(2, dtype=torch.uint8, device=p) - torch.ones(2, device=p).bool(),
    "mask - 2": lambda p: torch.ones(2, device=p).bool() - 2,
    "abs of a mask": lambda p: torch.ones(2, device=p).bool().abs(),
    "product of masks": lambda p: torch.ones(2, 2, device=p).bool() @ torch.ones(2, 2, device=p).bool(),
    "products of two dtypes": lambda p: torch.ones(2, 2, device=p).char().mv(torch.ones(2, device=p).byte()),
    "argmax of a mask": lambda p: torch.ones(2, device=p).bool().argmax(),
    "floor of a mask": lambda p: torch.ones(2, device=p).bool().floor(),
    "unfold": lambda p: F.unfold(torch.ones(1, 1, 2, 2, dtype=int, device=p), 1),
    "complex of bfloat16": lambda p: torch.complex(*[torch.ones(2, device=p).bfloat16()] * 2),
    "kthvalue of complex numbers": lambda p: torch.kthvalue(torch.ones(3, device=p) + 0j, 1).values,
    "ldexp by a mask": lambda p: torch.ldexp(torch.ones(2, device=p), torch.ones(2, device=p).bool()),
    "gcd of floats": lambda p: torch.gcd(torch.ones(2, device=p), torch.ones(2, device=p)),
    "cumsum_ of a mask": lambda p: torch.ones(2, device=p).bool().cumsum_(0),
    "arange of complex numbers": lambda p: torch.arange(3, dtype=torch.complex64, device=p),
    "huber_loss of integers": lambda p: F.huber_loss(
        torch.ones(2, device=p).int(), torch.ones(2, device=p).int()
    ),
    "huber_loss of a mask": lambda p: F.huber_loss(torch.ones(2, device=p).bool(), torch.ones(2, device=p)),
    "index_put of another dtype": lambda p: torch.zeros(3, dtype=int, device=p).index_put_(
        (torch.tensor([0], device=p),), torch.tensor(1.5, device=p)
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_integers_are_refused_as_on_the_cpu(name):
    expected = outcome(REFUSED[name], "cpu")
    assert isinstance(expected, str)
    assert outcome(REFUSED[name], "tpu") == expected


def test_what_the_cpu_takes_is_not_refused():
    before = torch.tpu.fallback_stats()
    x = torch.arange(16, device="tpu").reshape(1, 4, 4)
    assert F.avg_pool2d(x, 2).tolist() == [[[2, 4], [10, 12]]]
    large = torch.tensor([[2**62, 2**62 - 3, -7, 2]], device="tpu")
    assert F.avg_pool1d(large, 2).tolist() == F.avg_pool1d(large.cpu(), 2).tolist() == [[2**62 - 2, -2]]
    assert torch.clamp(x[0, 0], max=2).tolist() == [0, 1, 2, 2]
    real = torch.tensor([0.0, float("nan")], device="tpu")
    assert str(torch.clamp(real, 0.5 + 0j, 2).tolist()) == "[0.5, nan]"
    assert (torch.tensor([True], device="tpu") + 2).tolist() == [3]
    assert torch.tpu.fallback_stats() == before


def test_every_name_of_the_kinds_has_a_lowering():
    assert set(KINDS) <= set(TABLE)


class _Refusals(TorchDispatchMode):
    """What the CPU says of each call that the table serves: whether its dtypes are refused."""

    def __init__(self):
        super().__init__()
        self.refused: dict[tuple[str, torch.dtype], str] = {}
        self.taken: set[tuple[str, torch.dtype]] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name, tensors = functional_name(func._schema), [arg for arg in args if isinstance(arg, torch.Tensor)]
        key = (name, tensors[0].dtype) if name and tensors else None
        try:
            result = func(*args, **(kwargs or {}))
        except Exception as error:
            if key and "not implemented for" in str(error):
                self.refused[key] = str(error)
            raise
        if key and all(tensor.numel() for tensor in tensors):  # what has no elements no kernel refuses
            self.taken.add(key)
        return result


# Other devices of PyTorch's compute these in 16 bit.
_IN_16_BIT = {
    "_upsample_bilinear2d_aa",
    "avg_pool3d",
    "multi_margin_loss",
    "multilabel_margin_loss_forward",
}


@pytest.mark.sweep
@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.uint8, torch.bool, torch.bfloat16, torch.complex64], ids=str
)
def test_the_kinds_are_those_of_the_cpu(dtype):
    """Every sample of PyTorch's database in float32, its floats made integers."""
    mode = _Refusals()

    def recast(tensor):
        cast = tensor.detach()
        if not cast.is_floating_point() or cast.layout != torch.strided:
            return cast
        return cast.nan_to_num(1, 1, 1).clamp(0, 4).to(dtype)

    for op in op_db:
        if op.name.startswith(("jiterator", "fft", "signal")) or torch.float32 not in op.supported_dtypes(
            "cpu"
        ):
            continue
        torch.manual_seed(0)
        for sample in itertools.islice(op.sample_inputs("cpu", torch.float32), 6):
            given = tree_map_only(torch.Tensor, recast, (sample.input, sample.args, sample.kwargs))
            with warnings.catch_warnings(), mode:
                warnings.simplefilter("ignore")
                try:
                    op(given[0], *given[1], **given[2])
                except Exception:
                    continue
    computes = [
        f"{name}: {text}"
        for (name, first), text in mode.refused.items()
        if (name, first) not in mode.taken
        and name in KINDS
        and is_of_kind(jax_dtype(first), KINDS[name])
        and not (is_16_bit(jax_dtype(first)) and name in _IN_16_BIT)
    ]
    raises = [
        f"{name} of {first}"
        for name, first in mode.taken - mode.refused.keys()
        if KINDS.get(name, "any") not in ("any", "nowhere bool")
        and not is_of_kind(jax_dtype(first), KINDS[name])
        and TABLE[name].promote not in ("result", "inputs")
    ]
    assert (computes, raises) == ([], [])
