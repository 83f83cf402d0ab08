"""Compiled graphs that are called without AOTAutograd's runtime do what it does; the others still have it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

from tests.backend.test_compiled import Block, compiled, entries
from tpu_backend.compiled.backend import backend
from tpu_backend.compiled.ordinary import Halves

pytestmark = pytest.mark.usefixtures("forgotten_by_dynamo")


@pytest.fixture
def called_directly(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each graph that is compiled, with its backward, whether later calls are ours."""
    found: list[bool] = []
    chosen = Halves._called

    def noted(halves: Halves, *args: Any) -> Any:
        call = chosen(halves, *args)
        found.append(call is not None)
        return call

    monkeypatch.setattr(Halves, "_called", noted)
    return found


def leaf(*sizes: int) -> Tensor:
    return torch.randn(*sizes, device="tpu", requires_grad=True)


def is_ours(output: Tensor) -> bool:
    """Whether its graph was called without AOTAutograd's runtime, whose nodes are made in Python."""
    assert output.grad_fn is not None
    assert output.grad_fn.name() == "CompiledFunctionBackward"
    return not isinstance(output.grad_fn, torch.autograd.function.BackwardCFunction)


def called(function: Callable[..., Tensor], *inputs: Tensor) -> Callable[..., Tensor]:
    """It compiled, with its backward, so that later calls are ours."""
    run = compiled(function)
    for _ in range(2):
        torch.autograd.grad(run(*inputs).sum(), [each for each in inputs if each.requires_grad])
    return run


def test_the_second_step_is_ours_and_has_the_first_one_s_values():
    torch.manual_seed(0)
    model = Block().to("tpu")
    run, x = compiled(model), torch.randn(4, 5, 6, device="tpu")
    found = []
    for _ in range(3):
        torch.tpu.manual_seed(7)  # of its dropout
        output = run(x)
        found.append(
            (is_ours(output), output, *torch.autograd.grad(output.square().sum(), model.parameters()))
        )
    assert [first for first, *_ in found] == [False, True, True]
    for _, *values in found[1:]:
        for one, other in zip(found[0][1:], values, strict=True):
            assert torch.equal(one, other)


def test_a_step_is_two_entries():
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).to("tpu")
    x = torch.randn(4, 6, device="tpu")
    run = compiled(lambda x: model(x).square().sum())
    for _ in range(2):
        model.zero_grad()
        run(x).backward()
    model.zero_grad()
    forward, _, backward = entries(lambda: run(x).backward())  # between them the gradient of the loss
    assert "forward" in forward
    assert "backward" in backward


def test_inference(called_directly: list[bool]):
    weight = leaf(3, 3)
    run = compiled(lambda x: (x @ weight).relu())
    x = torch.randn(2, 3, device="tpu")
    with torch.no_grad():
        for _ in range(3):
            output = run(x)
            assert not output.requires_grad
            assert torch.equal(output, (x @ weight).relu())
    assert called_directly == [True]


def test_outputs_without_a_gradient():
    x = leaf(3, 4)
    run = compiled(lambda x: (x.sin(), x.argmax(1), x.cos()))
    for turn in range(3):
        one, places, other = run(x)
        assert not places.requires_grad
        assert is_ours(other) == (turn > 0)
        (gradient,) = torch.autograd.grad(other.sum(), x)  # nothing comes to the first
        torch.testing.assert_close(gradient, -x.sin().detach())
        assert one.requires_grad


def test_what_is_frozen_has_no_gradient():
    model = nn.Linear(3, 3).to("tpu")
    model.weight.requires_grad_(False)
    run = called(lambda x: model(x), leaf(2, 3))
    output = run(x := leaf(2, 3))
    assert is_ours(output)
    output.sum().backward()
    assert model.weight.grad is None
    assert model.bias.grad is not None
    assert x.grad is not None


def test_what_is_saved_may_not_be_written():
    x = leaf(3)
    run = called(lambda x: (x * x).sum(), x)
    output = run(x)
    assert is_ours(output)
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.backward()


@pytest.mark.parametrize("function", [F.linear, lambda x, w: x[:, 1:] @ w[1:]], ids=["whole", "sliced"])
def test_that_of_which_a_view_is_saved_may_not_be_written(function: Callable[[Tensor, Tensor], Tensor]):
    x, w = leaf(4, 4), leaf(4, 4)
    run = called(function, x, w)
    output = run(x, w)
    assert is_ours(output)
    with torch.no_grad():
        w.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(output.sum(), x)


def test_an_input_without_a_gradient_is_no_part_of_the_graph():
    x, w = leaf(3), leaf(3)
    run = compiled(lambda x, y: (x.sin() * y.detach()).sum())
    for turn in range(3):
        y = w * w
        y.register_hook(lambda gradient: gradient * 2)
        output = run(x, y)
        assert is_ours(output) == (turn > 0)
        output.backward()
        assert w.grad is None
        torch.testing.assert_close(*torch.autograd.grad(y.sum(), w), (4 * w).detach())


def test_hooks_that_are_graphs_are_left_to_aot_autograd():
    x, w = leaf(3, 3), leaf(3, 3)
    pack, unpack = fx.symbolic_trace(lambda t: t + 1), fx.symbolic_trace(lambda t: t * 3)
    run = compiled(lambda x: (x @ w).sin().sum())
    found = []
    for _ in range(3):
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            output = run(x)
        assert not is_ours(output)
        found += torch.autograd.grad(output, x)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_a_backward_pass_is_as_deterministic_as_its_forward_pass():
    x = leaf(3)
    run = called(torch.sin, x)
    output = run(x)
    assert is_ours(output)
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(RuntimeError, match="use_deterministic_algorithms"):
            torch.autograd.grad(output.sum(), x)
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_graph_that_dynamo_did_not_make():
    x = torch.ones(3, device="tpu")
    run = backend(fx.symbolic_trace(lambda x: (x.sin(), x.cos())), [x])
    for _ in range(2):
        for made, expected in zip(run(x), (x.sin(), x.cos()), strict=True):
            torch.testing.assert_close(made, expected)


def test_an_output_that_is_saved_may_not_be_written():
    x = leaf(3)
    run = called(torch.exp, x)
    output = run(x)
    assert is_ours(output)
    assert torch.equal(torch.autograd.grad(output.sum(), x, retain_graph=True)[0], output)
    with torch.no_grad():
        output.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_backward_twice():
    x = leaf(3)
    run = called(lambda x: x.sin().sum(), x)
    output = run(x)
    assert is_ours(output)
    first = torch.autograd.grad(output, x, retain_graph=True)
    assert torch.equal(*first, *torch.autograd.grad(output, x))
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(output, x)


def test_second_derivatives_are_refused():
    x = leaf(3)
    run = called(lambda x: x.sin().sum(), x)
    output = run(x)
    assert is_ours(output)
    (gradient,) = torch.autograd.grad(output, x, create_graph=True)
    torch.testing.assert_close(gradient.detach(), x.cos().detach())
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        torch.autograd.grad(gradient.sum(), x)


def test_a_backward_pass_within_vmap_is_refused():
    x = leaf(3)
    run = called(torch.sin, x)
    output = run(x)
    assert is_ours(output)
    with pytest.raises(RuntimeError, match="within vmap, grad or vjp"):
        torch.autograd.grad(output, x, torch.eye(3, device="tpu"), is_grads_batched=True)
    with pytest.raises(RuntimeError, match="within vmap, grad or vjp"):
        torch.func.vmap(lambda gradient: torch.autograd.grad(output, x, gradient)[0])(
            torch.eye(3, device="tpu")
        )


def test_hooks_of_what_is_saved():
    x = leaf(3)
    run = called(torch.sin, x)
    packed: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t * 0):
        output = run(x)
    assert is_ours(output)
    assert len(packed) == 1
    (gradient,) = torch.autograd.grad(output.sum(), x)
    assert torch.equal(gradient, torch.ones_like(x))  # cos(0)


def test_in_a_checkpoint():
    x = leaf(3)
    run = called(lambda x: x.sin().exp(), x)
    output = checkpoint(run, x, use_reentrant=False)
    assert is_ours(output)
    (gradient,) = torch.autograd.grad(output.sum(), x)
    torch.testing.assert_close(gradient, (x.sin().exp() * x.cos()).detach())


def test_gradients_are_kept_as_they_come():
    """Accumulated into parameters without a copy: nobody else holds them."""
    weight = leaf(3, 3)
    run = called(lambda x, w: x @ w, torch.ones(2, 3, device="tpu"), weight)
    output = run(torch.ones(2, 3, device="tpu"), weight)
    assert is_ours(output)
    before = torch.tpu.compile_stats()["ops_recorded"]
    output.backward(torch.ones(2, 3, device="tpu"))
    assert torch.tpu.compile_stats()["ops_recorded"] - before == 2  # the ones, and the graph
    torch.testing.assert_close(weight.grad, torch.full((3, 3), 2.0, device="tpu"))


def test_a_view_of_an_input_that_is_kept():
    weight = leaf(4, 5)
    given = torch.randn(3, 8, device="tpu")[:, 2:6]  # no dense tensor
    run = called(lambda x, w: (x @ w).relu(), given, weight)
    output = run(given, weight)
    assert is_ours(output)
    gradients = torch.autograd.grad(output.sum(), weight)
    torch.testing.assert_close(gradients, torch.autograd.grad((given @ weight).relu().sum(), weight))


# Dynamo itself makes some of what is returned, so that the graph is ordinary.
@pytest.mark.parametrize(
    ("function", "is_ordinary"),
    [
        pytest.param(lambda x: x.view(-1), False, id="a view of an input"),
        pytest.param(lambda x: (x, x.sin())[1].t(), True, id="a view of what it computes"),
        pytest.param(lambda x: (x.sin(),) * 2, True, id="one output twice"),
        pytest.param(lambda x: (x.sin(), x.shape[0]), True, id="a number"),
        pytest.param(lambda x: (x.sin(), x), True, id="an input"),
        pytest.param(lambda x: (x.sin(), x.detach()), False, id="an input without its gradient"),
        pytest.param(lambda x: (x * torch.arange(4, device="tpu"), x.cos()), True, id="a constant"),
    ],
)
def test_other_outputs(function: Callable[[Tensor], object], is_ordinary: bool, called_directly: list[bool]):
    run, x = compiled(function), leaf(3, 4)

    def values(made: object, x: Tensor) -> tuple[list[object], list[Tensor]]:
        outputs = list(made) if isinstance(made, tuple) else [made]
        trained = [each for each in outputs if isinstance(each, Tensor) and each.requires_grad]
        gradients = torch.autograd.grad(sum(each.sum() for each in trained), x)  # type: ignore[arg-type]
        return outputs, list(gradients)

    for _ in range(3):
        given = x.clone()
        outputs, gradients = values(run(given), given)
        expected, expected_gradients = values(function(given), given)
        for one, other in zip([*outputs, *gradients], [*expected, *expected_gradients], strict=True):
            if isinstance(one, Tensor):
                torch.testing.assert_close(one, other)
                assert (one._base is given) == (other._base is given)
            else:
                assert one == other
    assert called_directly == [is_ordinary]


def test_what_is_written_is_left_to_aot_autograd():
    norm = nn.BatchNorm1d(4).to("tpu")
    run, x = compiled(norm), leaf(6, 4)
    for turn in range(3):
        output = run(x)
        assert not is_ours(output)
        assert norm.num_batches_tracked == turn + 1
        output.square().sum().backward()

    def doubled(x: Tensor) -> Tensor:
        x.mul_(2)
        return x.sin()

    run = compiled(doubled)
    with torch.no_grad():
        values = torch.ones(3, device="tpu")
        for _ in range(3):
            run(values)
        assert values.tolist() == [8.0] * 3


def test_sizes_that_vary():
    weight = leaf(4, 4)
    run = compiled(lambda x: (x @ weight).relu().sum())
    for rows in (3, 5, 7, 9):
        x = torch.randn(rows, 4, device="tpu")
        gradient = torch.autograd.grad(run(x), weight)
        torch.testing.assert_close(gradient, torch.autograd.grad((x @ weight).relu().sum(), weight))


def test_a_gradient_that_is_expanded_or_transposed():
    x = leaf(3, 4)
    run = called(torch.sin, x)
    for gradient in (torch.ones(1, 1, device="tpu").expand(3, 4), torch.randn(4, 3, device="tpu").t()):
        output = run(x)
        assert is_ours(output)
        torch.testing.assert_close(torch.autograd.grad(output, x, gradient)[0], (x.cos() * gradient).detach())


def test_under_autocast():
    model = nn.Linear(4, 4).to("tpu")
    run, x = compiled(model), torch.randn(2, 4, device="tpu")
    for turn in range(3):
        with torch.autocast("tpu", torch.bfloat16):
            output = run(x)
            assert output.dtype is torch.bfloat16
            assert is_ours(output) == (turn > 0)
            output.float().square().sum().backward()


def test_an_error_is_raised_where_it_was_made():
    table = leaf(4, 2)
    run = compiled(lambda places: F.embedding(places, table))
    good, bad = (torch.tensor(places, device="tpu") for places in ([1, 3], [1, 9]))
    for _ in range(2):
        run(good).sum().backward()
    assert is_ours(run(good))
    with pytest.raises(IndexError, match=r"index 9|out of range"):
        run(bad).cpu()


def test_subclasses_are_left_to_aot_autograd():
    weight = TwoTensor(leaf(4, 4), leaf(4, 4)).detach().requires_grad_()
    run = compiled(lambda w: (w @ w).relu())
    for _ in range(3):
        output = run(weight)
        assert isinstance(output, TwoTensor)
        assert not is_ours(output)
        (gradient,) = torch.autograd.grad(output.sum(), weight)
        plain = weight.a.clone().requires_grad_()
        torch.testing.assert_close(gradient.a, *torch.autograd.grad((plain @ plain).relu().sum(), plain))
