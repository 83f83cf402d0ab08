"""Shapes, dtypes and strides of the operators whose meta kernels are in csrc/record/meta_kernels.cpp."""

import itertools
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_flatten, tree_map

# By their names in PyTorch's table of operators: those of backend/csrc/record/meta_kernels.cpp.
# fmt: off
NAMES = {
    "__rsub__", "abs", "add", "addcdiv", "addcmul", "addmm", "all", "amax", "amin", "any", "argmax",
    "argmin", "baddbmm", "bitwise_and", "bitwise_not", "bitwise_or", "bmm", "cat", "clamp", "cos", "cumsum",
    "div", "eq", "exp", "floor_divide", "full_like", "ge", "gt", "isnan", "le", "linalg.vector_norm", "log",
    "log_softmax", "logical_not", "lt", "masked_fill", "max", "maximum", "mean", "minimum", "mm", "mul",
    "ne", "neg", "nn.functional.embedding", "nn.functional.gelu", "nn.functional.layer_norm",
    "nn.functional.nll_loss", "nn.functional.relu", "nn.functional.scaled_dot_product_attention",
    "nn.functional.silu", "pow", "reciprocal", "rsqrt", "rsub", "scatter", "sigmoid", "sin", "softmax",
    "sqrt", "sub", "sum", "tanh", "topk", "tril", "triu", "where", "zeros_like",
}
# fmt: on
DTYPES = (torch.float32, torch.int64)
FORMS = [
    pytest.param(info, dtype, id=f"{info.name}{info.variant_test_name} {dtype}")
    for info in op_db
    if info.name in NAMES
    for dtype in DTYPES
    if dtype in info.supported_dtypes("cpu")
]
MOST_SAMPLES = 4  # of an operator and a dtype; nothing is computed


def test_every_name_is_one_of_pytorchs() -> None:
    assert NAMES.issubset(info.name for info in op_db)


def said(op: Callable[..., Any], args: Any, kwargs: Any) -> list[tuple[Any, ...]] | None:
    """Of each result; None where the arguments are refused."""
    try:
        results = op(*args, **kwargs)
    except (RuntimeError, NotImplementedError, IndexError, TypeError, ValueError):
        return None
    return [
        (item.dtype, tuple(item.shape), strides(item))
        for item in tree_flatten(results)[0]
        if isinstance(item, torch.Tensor)
    ]


def strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Those that mean something."""
    if tensor.numel() == 0:
        return ()
    return tuple(step for size, step in zip(tensor.shape, tensor.stride(), strict=True) if size > 1)


@pytest.mark.parametrize(("info", "dtype"), FORMS)
def test_results_look_as_on_the_cpu(info: Any, dtype: torch.dtype) -> None:
    samples = itertools.islice(info.sample_inputs("cpu", dtype), MOST_SAMPLES)
    for sample in samples:
        args = (sample.input, *sample.args)
        for given in (args, tree_map(turn, args)):
            moved, kwargs = tree_map(to_device, (given, sample.kwargs))
            expected = said(info.op, given, sample.kwargs)
            assert said(info.op, moved, kwargs) == expected, sample


def turn(value: Any) -> Any:
    """The same, the other way round in memory."""
    if isinstance(value, torch.Tensor) and value.dim() >= 2:
        return value.transpose(0, -1).contiguous().transpose(0, -1)
    return value


def to_device(value: Any) -> Any:
    if isinstance(value, torch.device):
        return torch.device("tpu")
    return value.to("tpu") if isinstance(value, torch.Tensor) and value.dim() > 0 else value


MODEL = """
import sys
import torch
from torch import nn
from torch.nn import functional

embedding, norm, linear = nn.Embedding(5, 8).to("tpu"), nn.LayerNorm(8).to("tpu"), nn.Linear(8, 8).to("tpu")
with torch.no_grad():
    x = functional.gelu(linear(norm(embedding(torch.arange(4, device="tpu")))))
    heads = x.view(1, 4, 2, 4).transpose(1, 2)
    y = functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
    y = torch.where(y > 0, y, 0.0) * 2 + 1 - torch.randn(4, device="tpu") / 3
    print(functional.softmax(y, -1).sum().item(), (1 - y).abs().mean().item())
    print(torch.multinomial(x.exp(), 1).shape)
functional.scaled_dot_product_attention(*[heads.clone().requires_grad_()] * 3).sum().backward()
print("torch._dynamo" in sys.modules, "sympy" in sys.modules)
"""


def lists(device: str) -> list[list[torch.Tensor]]:
    """Three lists whose elements are of several forms, some of them several times, none in a row."""
    made = [
        torch.rand(2, 3),
        torch.rand(3, 2).t(),
        torch.rand(4).half(),
        torch.rand(2, 3),
        torch.rand(4).half(),
    ]
    made += [torch.rand(2, 0), torch.rand(2, 3).double(), torch.rand(3, 2).t()]
    return [[each.clone().to(device) for each in made] for _ in range(3)]


LIST_OPS: dict[str, Callable[..., Any]] = {
    "add": lambda x, y, z: torch._foreach_add(x, y, alpha=2),
    "addcmul": lambda x, y, z: torch._foreach_addcmul(x, y, z, value=0.5),
    "norm": lambda x, y, z: torch._foreach_norm(x),
    "lerp": lambda x, y, z: torch._foreach_lerp(x, y, z),
    "a number each": lambda x, y, z: torch._foreach_mul(x, [1.5] * len(x)),
    "in place": lambda x, y, z: torch._foreach_lerp_(x, y, 0.5) or x,
}


@pytest.mark.parametrize("name", LIST_OPS)
def test_of_lists_each_element_has_its_own_form_and_value(name: str) -> None:
    torch.manual_seed(0)
    theirs = LIST_OPS[name](*lists("cpu"))
    torch.manual_seed(0)
    ours = LIST_OPS[name](*lists("tpu"))
    assert said(lambda: ours, (), {}) == said(lambda: theirs, (), {})
    for got, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got.cpu(), expected)


def test_an_element_that_does_not_fit_is_refused_in_pytorchs_words() -> None:
    messages = []
    for device in ("cpu", "tpu"):
        x, y, _ = lists(device)
        y[4] = torch.ones(5, dtype=torch.half, device=device)
        with pytest.raises(RuntimeError) as caught:
            torch._foreach_add(x, y)
        messages.append(str(caught.value).splitlines()[0])
    assert messages[0] == messages[1]


def test_a_small_model_imports_neither_the_compiler_of_pytorch_nor_its_algebra() -> None:
    ended = subprocess.run([sys.executable, "-c", MODEL], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-1] == "False False"
