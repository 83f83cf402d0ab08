"""A `jax_op` inside of what torch.compile compiles stays in the graph."""

import jax
import jax.numpy as jnp
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters

from tpu_backend import jax_op

pytestmark = pytest.mark.usefixtures("forgotten_by_dynamo")


@jax_op
def decayed(x, rate, *, steps):
    """A scan over the first dim, as PyTorch has none."""
    return jax.lax.scan(lambda carry, row: (carry * rate + row,) * 2, jnp.zeros_like(x[0]), x)[1][-steps:]


@jax_op
def named(x, index):
    return {"sine": jnp.sin(x), "rest": (index + 1, x.sum())}


def model(x: Tensor, weight: Tensor, rate: Tensor) -> Tensor:
    return decayed(F.silu(x @ weight), rate, steps=3).square().mean()


def values_and_gradients(call, device: str) -> list[Tensor]:
    torch.manual_seed(0)
    x, weight, rate = torch.randn(5, 4), torch.randn(4, 4), torch.full((4,), 0.9)
    weight, rate = (each.to(device).requires_grad_() for each in (weight, rate))
    loss = call(x.to(device), weight, rate)
    loss.backward()
    return [loss.detach().cpu(), weight.grad.cpu(), rate.grad.cpu()]


def test_a_call_stays_in_the_graph_forward_and_backward():
    fast = torch.compile(model, fullgraph=True)
    expected = values_and_gradients(model, "cpu")
    torch.testing.assert_close(values_and_gradients(fast, "tpu"), expected)
    before = torch.tpu.compile_stats()["ops_recorded"]
    values_and_gradients(fast, "tpu")
    count = torch.tpu.compile_stats()["ops_recorded"] - before
    assert 0 < count <= 3  # forward, the first gradient, backward
    recorded = [call.split("(")[0] for call, _ in torch.tpu.recent_ops()[-count:]]
    assert [name for name in recorded if name.startswith("tpu_jax::")] == []
    assert not counters["graph_break"]


def test_a_tree_of_results_and_a_number_beside_tensors():
    def function(x: Tensor, index: Tensor) -> Tensor:
        found = named(x * 2, index)
        return found["sine"] + found["rest"][0] * found["rest"][1]

    x, index = torch.randn(3), torch.tensor(4)
    found = torch.compile(function, fullgraph=True)(x.to("tpu"), index)
    torch.testing.assert_close(found.cpu(), torch.sin(x * 2) + 5 * (x * 2).sum())


def test_each_size_and_each_static_value_is_one_program():
    def function(x: Tensor, steps: int) -> Tensor:
        return decayed(x, torch.ones(2, device=x.device), steps=steps).sum(0)

    fast = torch.compile(function, fullgraph=True, dynamic=True)
    for size, steps in ((4, 1), (6, 1), (6, 2)):
        x = torch.randn(size, 2)
        expected = x.cumsum(0)[-steps:].sum(0)
        torch.testing.assert_close(fast(x.to("tpu"), steps).cpu(), expected)


def test_a_static_value_that_dynamo_cannot_hold_breaks_the_graph():
    @jax_op
    def applied(x, *, function):
        return function(x)

    fast = torch.compile(lambda x: applied(x + 1, function=jnp.cos) * 2)
    x = torch.randn(3)
    torch.testing.assert_close(fast(x.to("tpu")).cpu(), torch.cos(x + 1) * 2)
    assert counters["graph_break"]


def test_on_cpu_tensors_other_backends_have_it_too():
    torch.testing.assert_close(
        values_and_gradients(torch.compile(model, fullgraph=True, backend="aot_eager"), "cpu"),
        values_and_gradients(model, "cpu"),
    )
