"""A graph with something that has no XLA form is split around it, in eager mode's order."""

import logging
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytestmark = pytest.mark.usefixtures("forgotten_by_dynamo")

called: list[str] = []


@torch.library.custom_op("tputrain_tests::cubed", mutates_args=())
def cubed(x: Tensor) -> Tensor:
    called.append(x.device.type)
    return x * x * x


@cubed.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def keep_input(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


cubed.register_autograd(lambda ctx, slope: 3 * slope * ctx.saved_tensors[0] ** 2, setup_context=keep_input)


@torch.library.custom_op("tputrain_tests::halves", mutates_args=())
def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    first, second = x.chunk(2)
    return first.clone(), second.clone()


@halves.register_fake
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    first, second = x.chunk(2)
    return torch.empty_like(first), torch.empty_like(second)


@torch.library.custom_op("tputrain_tests::count_up", mutates_args=("total",))
def count_up(total: Tensor, x: Tensor) -> None:
    total += x.sum()


@pytest.fixture(autouse=True)
def _nothing_called():
    called.clear()


def recorded(run: Callable[[], object]) -> list[str]:
    torch.tpu.flush()
    before = torch.tpu.compile_stats()["ops_recorded"]
    run()
    count = torch.tpu.compile_stats()["ops_recorded"] - before
    return [call.split("(")[0].rstrip("_0123456789") for call, _ in torch.tpu.recent_ops()[-count:]]


def test_a_custom_operator_splits_forward_and_stays_differentiable(caplog):
    def model(x: Tensor, w: Tensor) -> Tensor:
        return (cubed(F.silu(x @ w)) + 1).square().mean()

    found = []
    with caplog.at_level(logging.INFO, "tpu_backend.compile"):
        for call, device in ((model, "cpu"), (torch.compile(model), "tpu")):
            torch.manual_seed(0)
            x, w = torch.randn(4, 3).to(device), torch.randn(3, 3).to(device).requires_grad_()
            loss = call(x, w)
            loss.backward()
            found.append((loss.detach().cpu(), w.grad.cpu()))
    for ours, theirs in zip(*reversed(found), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert called[-1] == "tpu"
    lines = [line for line in caplog.messages if "is split" in line]
    assert lines == [
        "torch.compile: the forward graph is split into 2 compiled parts, around what runs as in eager mode: "
        "tputrain_tests.cubed.default has no lowering"
    ]
    names = recorded(lambda: torch.compile(model)(x, w.detach()))
    assert names == ["tpu_graph::inference", "aten::mul.Tensor", "aten::mul.Tensor", "tpu_graph::inference"]


def several(x: Tensor) -> Tensor:
    first, second = halves(F.dropout(x, 0.5))
    return F.dropout(cubed(first) + second, 0.5) * second.shape[0]


@pytest.mark.parametrize("dynamic", [False, True])
def test_random_numbers_and_sizes_come_through_the_parts(dynamic):
    fast = torch.compile(several, backend="tpu", dynamic=dynamic)
    for size in (4, 6):
        x = torch.randn(size, 3, device="tpu")
        results = []
        for function in (several, fast):
            torch.tpu.manual_seed(5)
            results.append((function(x).cpu(), torch.tpu.get_rng_state()))
        for ours, theirs in zip(*results, strict=True):
            assert torch.equal(ours, theirs)


def test_an_operator_that_writes_its_argument():
    def counted(total: Tensor, x: Tensor) -> Tensor:
        y = x * 2
        count_up(total, y)
        return y + total

    total, x = torch.zeros((), device="tpu"), torch.arange(3.0, device="tpu")
    fast = torch.compile(counted, backend="tpu")
    assert fast(total, x).tolist() == [6, 8, 10]
    assert fast(total, x).tolist() == [12, 14, 16]
    assert total.item() == 12


def test_what_pytorch_has_and_the_table_has_not(caplog):
    def eigen(x: Tensor) -> Tensor:
        return torch.linalg.eigvals(x + 1).abs().sum()

    x = torch.randn(3, 3)
    with caplog.at_level(logging.INFO, "tpu_backend.compile"):
        result = torch.compile(eigen, backend="tpu")(x.to("tpu"))
    torch.testing.assert_close(result.cpu(), eigen(x))
    assert "the inference graph is split into 2 compiled parts" in caplog.text


def test_random_numbers_in_a_branch_are_drawn_as_in_eager_mode(caplog):
    def branch(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: x + torch.rand_like(x), lambda x: x.clone(), (x * 2,)) + 1

    x = torch.ones(3, device="tpu")
    torch.tpu.manual_seed(3)
    expected = (x * 2 + torch.rand_like(x) + 1).cpu()
    torch.tpu.manual_seed(3)
    with caplog.at_level(logging.INFO, "tpu_backend.compile"):
        result = torch.compile(branch, backend="tpu")(x)
    assert torch.equal(result.cpu(), expected)
    assert "random numbers in a branch or body: how many, the data decides" in caplog.text
