"""Calls that take a number, the numbers and the dtypes that they are tried with, and what must be equal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

Call = Callable[[str, torch.dtype, Any], torch.Tensor]

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
DTYPES = (*INTEGERS, torch.bool, *FLOATS)

NUMBERS = (
    2,
    300,
    -1,
    2**24 + 1,
    2**31,
    2**53 + 1,
    2**63 - 1,
    -(2**63),
    1e9 + 7,
    2.0**24 + 1,
    2.0**53 + 2,
    300.0,
    -3.0,
    0.5,
    -0.0,
    1e-9,
    65504.0 * 2,
    -1e9,
    1e40,
    float("inf"),
    float("nan"),
)


def base(place: str, dtype: torch.dtype, count: int = 4) -> torch.Tensor:
    return torch.tensor([0, 1, 3, 5][:count]).to(dtype).to(place)


def square(place: str, dtype: torch.dtype) -> torch.Tensor:
    return base(place, dtype).reshape(2, 2)


def mask(place: str) -> torch.Tensor:
    return torch.tensor([True, False, True, False], device=place)


def index(place: str) -> torch.Tensor:
    return torch.tensor([0, 2], device=place)


def _assigned(tensor: torch.Tensor, key: Any, value: Any) -> torch.Tensor:
    tensor[key] = value
    return tensor


# The number becomes an element: PyTorch converts it to the tensor's dtype, and raises where it overflows.
ELEMENTS: dict[str, Call] = {
    "full": lambda p, d, v: torch.full((2,), v, dtype=d, device=p),
    "full of one": lambda p, d, v: torch.full((1,), v, dtype=d, device=p),
    "full_like": lambda p, d, v: torch.full_like(base(p, d), v),
    "new_full": lambda p, d, v: base(p, d).new_full((2,), v),
    "scalar_tensor": lambda p, d, v: torch.scalar_tensor(v, dtype=d, device=p),
    "fill_": lambda p, d, v: base(p, d).fill_(v),
    "fill_ of a view": lambda p, d, v: _assigned(base(p, d), slice(0, 0), 1)[1:3].fill_(v),
    "x[1] =": lambda p, d, v: _assigned(base(p, d), 1, v),
    "x[1:3] =": lambda p, d, v: _assigned(base(p, d), slice(1, 3), v),
    "x[mask] =": lambda p, d, v: _assigned(base(p, d), mask(p), v),
    "x[index] =": lambda p, d, v: _assigned(base(p, d), index(p), v),
    "masked_fill": lambda p, d, v: base(p, d).masked_fill(mask(p), v),
    "masked_fill_": lambda p, d, v: base(p, d).masked_fill_(mask(p), v),
    "masked_fill of a tensor": lambda p, d, v: base(p, d).masked_fill(mask(p), torch.tensor(v)),
    "index_fill": lambda p, d, v: base(p, d).index_fill(0, index(p), v),
    "scatter": lambda p, d, v: base(p, d).scatter(0, index(p), v),
    "scatter_": lambda p, d, v: base(p, d).scatter_(0, index(p), v),
    "scatter, add": lambda p, d, v: base(p, d).scatter(0, index(p), v, reduce="add"),
    "constant_pad_nd": lambda p, d, v: torch.constant_pad_nd(base(p, d), (1, 2), v),
    "fill_diagonal_": lambda p, d, v: square(p, d).fill_diagonal_(v),
    "linspace": lambda p, d, v: torch.linspace(v, v, 2, dtype=d, device=p),
    "threshold": lambda p, d, v: F.threshold(base(p, d), 2, v),
    "where": lambda p, d, v: torch.where(mask(p), base(p, d), v),
    "clamp": lambda p, d, v: base(p, d).clamp(min=v),
    "clamp_": lambda p, d, v: base(p, d).clamp_(max=v),
    "hardtanh": lambda p, d, v: torch.ops.aten.hardtanh(base(p, d), v, v),
}

# The number is computed with.
OPERANDS: dict[str, Call] = {
    "add": lambda p, d, v: base(p, d) + v,
    "add_": lambda p, d, v: base(p, d).add_(v),
    "add, alpha": lambda p, d, v: torch.add(base(p, d), base(p, d), alpha=v),
    "sub": lambda p, d, v: base(p, d) - v,
    "sub, alpha": lambda p, d, v: torch.sub(base(p, d), base(p, d), alpha=v),
    "rsub": lambda p, d, v: v - base(p, d),
    "mul": lambda p, d, v: base(p, d) * v,
    "mul_": lambda p, d, v: base(p, d).mul_(v),
    "mul by a tensor": lambda p, d, v: base(p, d) * torch.tensor(v),
    "index_add, alpha": lambda p, d, v: base(p, d).index_add(0, index(p), base(p, d, 2), alpha=v),
    "addcmul": lambda p, d, v: torch.addcmul(base(p, d), base(p, d), base(p, d), value=v),
    "addcdiv": lambda p, d, v: torch.addcdiv(base(p, d), base(p, d), base(p, d) + 1, value=v),
    "addmm": lambda p, d, v: torch.addmm(square(p, d), square(p, d), square(p, d), alpha=v, beta=v),
    "addmv": lambda p, d, v: torch.addmv(base(p, d, 2), square(p, d), base(p, d, 2), alpha=v, beta=v),
    "lerp": lambda p, d, v: torch.lerp(base(p, d), base(p, d) + 1, v),
    "floor_divide": lambda p, d, v: base(p, d) // v,
    "remainder": lambda p, d, v: base(p, d) % v,
    "fmod": lambda p, d, v: torch.fmod(base(p, d), v),
    "eq": lambda p, d, v: base(p, d) == v,
    "lt": lambda p, d, v: base(p, d) < v,
    "ge": lambda p, d, v: base(p, d) >= v,
    "and": lambda p, d, v: base(p, d) & v,
    "xor_": lambda p, d, v: base(p, d).bitwise_xor_(v),
    "leaky_relu": lambda p, d, v: F.leaky_relu(base(p, d) - 2, v),
    "hardshrink": lambda p, d, v: F.hardshrink(base(p, d), v),
    "softplus": lambda p, d, v: F.softplus(base(p, d), v),
    "foreach add": lambda p, d, v: torch._foreach_add([base(p, d)], v)[0],
    "foreach clamp_max": lambda p, d, v: torch._foreach_clamp_max([base(p, d)], [v])[0],
    "foreach addcmul": lambda p, d, v: torch._foreach_addcmul(*[[base(p, d)]] * 3, v)[0],
}

# XLA makes a select of a product with a converted bool: zero times infinity is zero there.
_SELECTS = frozenset({"mul", "mul by a tensor", "foreach mul"})


def is_compared(name: str, dtype: torch.dtype, number: Any) -> bool:
    if name == "sub, alpha" and dtype == torch.int32 and number == 2**31:
        return False  # the CPU looks whether the negated number fits
    if name == "sub, alpha" and dtype in FLOATS and number == -(2**63):
        return False  # the CPU negates it as an integer, which wraps
    if name == "addmm" and number == float("inf"):
        return False  # whether zeros of the factors meet the infinity is the BLAS's affair
    if name == "linspace" and dtype == torch.int64 and number == 2**63 - 1:
        return False  # the CPU's wraps to the least one
    return not (dtype == torch.bool and name in _SELECTS and not abs(number) < 1e38)


def outcome(call: Call, place: str, dtype: torch.dtype, number: Any) -> torch.Tensor | str:
    """The result on the host, or the error in one line."""
    try:
        return call(place, dtype, number).cpu()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def is_same(ours: torch.Tensor | str, theirs: torch.Tensor | str) -> bool:
    if isinstance(ours, str) or isinstance(theirs, str):
        return isinstance(ours, str) and isinstance(theirs, str) and ours == theirs
    if ours.dtype != theirs.dtype or ours.shape != theirs.shape:
        return False
    if not theirs.is_floating_point():
        return torch.equal(ours, theirs)
    rtol = 1e-2 if theirs.element_size() == 2 else 1e-6
    return torch.allclose(ours.double(), theirs.double(), rtol=rtol, atol=0, equal_nan=True)


def differences(
    calls: dict[str, Call], dtypes: tuple[torch.dtype, ...], numbers: tuple[Any, ...]
) -> list[str]:
    """One line a call that does not do what the CPU does."""
    found = []
    for name, call in calls.items():
        for dtype in dtypes:
            for number in numbers:
                if not is_compared(name, dtype, number):
                    continue
                theirs, ours = (outcome(call, place, dtype, number) for place in ("cpu", "tpu"))
                if not is_same(ours, theirs):
                    found.append(f"{name}, {dtype}, {number!r}: {ours} where the CPU has {theirs}")
    return found
