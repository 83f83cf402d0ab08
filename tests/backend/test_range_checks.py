"""Indices out of range, division by zero: the CPU's error, at the op in debug mode, else at the next wait."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.backend.fresh_process import run_python

Index = Callable[..., Tensor]

WRONG: dict[str, Callable[[Tensor, Index], object]] = {
    "embedding": lambda x, i: F.embedding(i(0, 3), x),
    "embedding, negative": lambda x, i: F.embedding(i(-1), x),
    "index": lambda x, i: x[i(1, 3)],
    "index, negative": lambda x, i: x[i(-4)],
    "index, second dimension": lambda x, i: x[i(1, 2), i(0, 9)],
    "index_put": lambda x, i: x.index_put((i(3),), x[0]),
    "setitem": lambda x, i: x.clone().__setitem__(i(3), 1.0),
    "index_select": lambda x, i: x.index_select(0, i(3)),
    "gather": lambda x, i: x.gather(1, i(4)[None]),
    "scatter of a number": lambda x, i: x.scatter(0, i(3)[None], 1.0),
    "scatter": lambda x, i: x.scatter(1, i(-1)[None], x),
    "scatter_add": lambda x, i: x.scatter_add(0, i(3)[None], x),
    "scatter_reduce": lambda x, i: x.scatter_reduce(0, i(3)[None], x, "amax"),
    "index_add": lambda x, i: x.index_add(0, i(3), x[:1]),
    "index_copy": lambda x, i: x.index_copy(0, i(-1), x[:1]),
    "index_fill": lambda x, i: x.index_fill(0, i(3), 1.0),
    "index_reduce": lambda x, i: x.index_reduce(0, i(3), x[:1], "prod"),
    "take": lambda x, i: x.take(i(12)),
    "put": lambda x, i: x.clone().put_(i(12), x[0, :1]),
    "floor division": lambda x, i: i(4, 2) // i(1, 0),
    "truncated division": lambda x, i: torch.div(i(4, 2), i(1, 0), rounding_mode="trunc"),
    "remainder": lambda x, i: i(4, 2) % i(1, 0),
    "place in the plane": lambda x, i: F.max_unpool2d(x[None], i(*range(11), 48).reshape(1, 3, 4), 2),
    "probability": lambda x, i: torch.bernoulli(x * 2),
    "weights below zero": lambda x, i: torch.multinomial(x - 0.5, 1),
    "weights of nothing": lambda x, i: torch.multinomial(x * 0, 1),
    "deviations below zero": lambda x, i: torch.normal(x, x - 0.5),
    "a deviation below zero": lambda x, i: torch.normal(0.0, x[0, 0] - 0.5),
    "singular values of what is not finite": lambda x, i: torch.linalg.svdvals(x / 0),
    "singular values of a batch": lambda x, i: torch.linalg.svd(torch.stack([x, x / 0, x / 0])),
    "loss of what is no probability": lambda x, i: F.binary_cross_entropy(x * 2, x),
    "loss against what is no probability": lambda x, i: F.binary_cross_entropy(x, x * 2),
    "label": lambda x, i: F.nll_loss(x, i(1, 2, 4)),
    "label, negative": lambda x, i: F.cross_entropy(x, i(1, 2, -1)),
    "bag, largest": lambda x, i: F.embedding_bag(i(1, 3), x, i(0), mode="max"),
    "bag of doubles": lambda x, i: F.embedding_bag(i(1, 3), x.double(), i(0)),
    "bag with padding": lambda x, i: F.embedding_bag(i(1, -2), x, i(0), padding_idx=1, mode="max"),
    "first bag": lambda x, i: F.embedding_bag(i(1, 2), x, i(1)),
    "last bag": lambda x, i: F.embedding_bag(i(1, 2), x, i(0, 3)),
    "index_add to a vector": lambda x, i: x[0].index_add(0, i(4), x[0, :1]),
    "rate below zero": lambda x, i: torch.poisson(x - 0.5),
    "label of a margin": lambda x, i: F.multi_margin_loss(x, i(1, 2, 4)),
    "label of a single margin": lambda x, i: F.multi_margin_loss(x[0], i(4)[0]),
    "labels of a margin": lambda x, i: F.multilabel_margin_loss(x[0], i(1, -1, 4, 0)),
    "label of an image": lambda x, i: F.nll_loss(x[None, :, None], i(0, 1, 2, 3)[None, None]),
}

# What PyTorch adds where nobody has written a message.
_NOT_WORDED = (
    "  (Could this error message be improved?  If so, please report an enhancement request to PyTorch.)"
)

# What does not fit the number of Trues in a mask: the CPU's type, the number in other words.
MISCOUNTED: dict[str, Callable[[Tensor, Index], object]] = {
    "values for a mask": lambda x, i: x.clone().__setitem__(x > 0.5, torch.ones(3, device=x.device)),
    "no values for a mask": lambda x, i: x.clone().__setitem__(x > 0.5, torch.ones(0, device=x.device)),
    "masked_scatter": lambda x, i: x.masked_scatter(x > 0.5, torch.ones(3, device=x.device)),
    "repeat_interleave": lambda x, i: torch.repeat_interleave(i(1, 2), output_size=5),
}


def _error(use: Callable[[Tensor, Index], object], device: str) -> Exception | None:
    x = torch.arange(12.0, device=device).reshape(3, 4) / 12
    try:
        result = use(x, lambda *values: torch.tensor(values, device=device))
        torch.tpu.synchronize()
        del result
    except Exception as error:
        return error
    return None


@pytest.mark.filterwarnings("ignore:index_reduce")
@pytest.mark.parametrize("mode", ["debug", "strict", "fused"])
def test_an_index_out_of_range_raises_what_the_cpu_raises(mode: str) -> None:
    with torch.tpu.eager_mode(mode):
        for name, use in WRONG.items():
            expected, met = _error(use, "cpu"), _error(use, "tpu")
            assert type(met) is type(expected), name
            said = str(expected).splitlines()[0].removesuffix(_NOT_WORDED)
            assert str(met).splitlines()[0] == said, name
    assert torch.ones(3, device="tpu").sum().item() == 3


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_an_index_of_a_bag_out_of_range_is_said_in_one_way(mode: str) -> None:
    """The CPU has three for its kinds of bags and dtypes, one of which names no index."""
    table = torch.ones(3, 2, device="tpu")
    for index in (3, -1):
        with pytest.raises(RuntimeError, match=f"num_embeddings but found idx to be {index}"):
            F.embedding_bag(torch.tensor([[1, index]], device="tpu"), table, mode=mode).cpu()


def test_a_histogram_of_what_is_not_finite_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"torch\.histc: the range of the elements is not finite"):
        torch.histc(torch.tensor([1.0, torch.nan], device="tpu"), 4).cpu()


def test_a_number_of_values_that_is_not_the_masks_raises_what_the_cpu_raises() -> None:
    for name, use in MISCOUNTED.items():
        expected, met = _error(use, "cpu"), _error(use, "tpu")
        assert type(met) is type(expected) is RuntimeError, name
        assert str(met).split()[0] == str(expected).split()[0] or name == "repeat_interleave", name


def test_indices_in_range_raise_nothing() -> None:
    x = torch.arange(12.0, device="tpu").reshape(3, 4)
    ignored = torch.tensor([1, -100, 2], device="tpu")
    assert F.cross_entropy(x, ignored).isfinite()
    assert x[torch.tensor([-3, 2], device="tpu")].tolist() == [[0, 1, 2, 3], [8, 9, 10, 11]]
    assert x[torch.tensor([], dtype=torch.int64, device="tpu")].shape == (0, 4)
    torch.tpu.synchronize()


def test_the_error_names_the_op_and_the_line_that_recorded_it() -> None:
    x = torch.ones(3, device="tpu")
    y = x[torch.tensor([7], device="tpu")]  # the line that is wrong
    with pytest.raises(IndexError) as raised:
        y.item()
    message = str(raised.value)
    assert "index 7 is out of bounds for dimension 0 with size 3" in message
    assert "aten::index.Tensor(self=float32[3]" in message
    assert f"{__file__}:" in message
    assert "# the line that is wrong" in message


def test_it_is_raised_once_and_by_a_read_of_anything_computed_after_it() -> None:
    x = torch.ones(3, device="tpu")
    bad = F.embedding(torch.tensor([5], device="tpu"), x[:, None])
    other = x + 1
    torch.tpu.flush()
    with pytest.raises(IndexError):
        other.tolist()
    assert other.tolist() == [2, 2, 2]
    assert bad.isfinite().all()


def test_a_read_of_an_earlier_result_does_not_wait_for_later_checks() -> None:
    early = torch.ones(3, device="tpu") + 1
    torch.tpu.flush()
    late = torch.ones(3, device="tpu")[torch.tensor([9], device="tpu")]
    torch.tpu.flush()
    assert early.tolist() == [2, 2, 2]
    with pytest.raises(IndexError):
        late.item()


def test_checks_of_a_long_run_without_a_read_stay_few_and_are_not_lost() -> None:
    x, one = torch.ones(3, device="tpu"), torch.tensor([1], device="tpu")

    def run_long() -> None:
        wrong = x[one + 8]
        torch.tpu.flush()
        for _ in range(200):
            x[one]
            torch.tpu.flush()
        wrong.item()

    with pytest.raises(IndexError):
        run_long()


def test_a_step_that_failed_is_found_before_its_parameters_are_read() -> None:
    embedding = torch.nn.Embedding(4, 2, device="tpu")
    optimizer = torch.optim.SGD(embedding.parameters(), lr=0.1)
    embedding(torch.tensor([4], device="tpu")).sum().backward()
    optimizer.step()
    with pytest.raises(IndexError, match="index out of range in self"):
        embedding.weight.detach().cpu()


def test_a_compiled_graph_names_the_operator_and_the_line_inside_it() -> None:
    embedding = torch.nn.Embedding(4, 3, device="tpu")

    def loss(tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = embedding(tokens)
        return torch.nn.functional.cross_entropy(logits, labels)

    fast = torch.compile(loss)
    good = torch.tensor([0, 1], device="tpu")
    fast(good, good).item()
    with pytest.raises(IndexError, match="index out of range in self") as raised:
        fast(good + 3, good).item()
    assert "in aten::embedding of tpu_graph::forward_" in str(raised.value)
    assert str(raised.value).endswith("logits = embedding(tokens)")
    fast(good, good + 2).backward()
    with pytest.raises(IndexError, match="Target 3 is out of bounds") as raised:
        torch.tpu.synchronize()
    assert "in aten::nll_loss_forward of tpu_graph::forward_" in str(raised.value)
    assert str(raised.value).endswith("return torch.nn.functional.cross_entropy(logits, labels)")


def test_one_hot_in_a_compiled_graph_is_checked_there() -> None:
    fast = torch.compile(lambda labels: torch.nn.functional.one_hot(labels + 1, 5).sum(0))
    labels = torch.tensor([0, 1], device="tpu")
    before = torch.tpu.fallback_stats()
    assert fast(labels).tolist() == [0, 1, 1, 0, 0]
    with pytest.raises(
        RuntimeError, match=r"(?s)Class values must be smaller.*in aten::_assert_async.msg of tpu_gr"
    ):
        fast(labels + 3).tolist()
    assert torch.tpu.fallback_stats() == before


def test_a_known_divisor_of_zero_raises_at_once() -> None:
    x = torch.tensor([4, 2], device="tpu")
    for divide in (torch.fmod, torch.remainder, torch.floor_divide):
        with pytest.raises(RuntimeError, match="ZeroDivisionError"):
            divide(x, 0)
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        torch.div(x, 0, rounding_mode="trunc")
    assert torch.isinf(torch.div(x, 0)).all()
    assert (x[:0] // 0).shape == (0,)
    assert (x[:0] % torch.tensor([0], device="tpu")).tolist() == []


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_zeros_divided_by_zeros_that_xla_knows_of_end_no_process(dtype: torch.dtype) -> None:
    """XLA:CPU took 0 % 0 of constants for a division that it may try while it compiles."""
    x = torch.tensor([4, 2], dtype=dtype, device="tpu")
    for divide in (torch.fmod, torch.remainder, torch.floor_divide):
        result = divide(x - x, x - x)
        with pytest.raises(RuntimeError, match="ZeroDivisionError"):
            result.tolist()
    result = torch.div(x - x, x - x, rounding_mode="trunc")
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        result.tolist()


def test_what_nobody_waited_for_is_said_at_exit() -> None:
    result = run_python(
        """
        import torch
        table = torch.nn.Embedding(5, 3, device="tpu")
        optimizer = torch.optim.SGD(table.parameters(), 0.1)
        for row in (1, 9, 2):
            table(torch.tensor([row], device="tpu")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        print("done")
        """
    )
    assert result.stdout == "done\n"
    assert "tpu: found at exit: IndexError: index out of range in self" in result.stderr
    assert result.returncode == 1


def test_an_assertion_is_raised_by_the_read_that_waits_for_it() -> None:
    x = torch.ones(3, device="tpu")
    before = torch.tpu.fallback_stats()
    torch._assert_async((x > 0).all(), "never said")
    assert x.sum().item() == 3
    torch._assert_async((x > 1).all(), "x is {small}")
    with pytest.raises(RuntimeError, match=r"(?s)x is \{small\}.*test_range_checks.py:\d+: torch"):
        (2 * x).tolist()
    torch._assert_async((x > 1).all())  # nothing else is left to be run
    with pytest.raises(RuntimeError, match="Expected Tensor with single nonzero value, but got zero"):
        torch.tpu.synchronize()
    assert torch.tpu.fallback_stats() == before


def test_an_assertion_in_a_region_and_in_a_captured_step() -> None:
    for kind in torch.tpu.spmd, torch.tpu.capture:

        @kind
        def step(x: torch.Tensor) -> torch.Tensor:
            torch._assert_async((x > 0).all(), "x is positive")
            return 2 * x

        for _ in range(5):
            assert step(torch.ones(3, device="tpu")).tolist() == [2, 2, 2]
        with pytest.raises(RuntimeError, match="x is positive"):
            step(-torch.ones(3, device="tpu")).tolist()


@pytest.mark.parametrize("shape", [(3,), (0,)])
def test_an_assertion_of_other_than_one_element_is_refused_at_the_call(shape: tuple[int, ...]) -> None:
    messages = []
    for place in "cpu", "tpu":
        with pytest.raises(RuntimeError) as caught:
            torch._assert_async(torch.ones(shape, device=place), "")
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
