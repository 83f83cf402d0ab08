"""A linear layer is one operation and its gradients another, unless somebody looks or differentiates them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tpu_backend.lowering.platforms import lowering_for
from tpu_backend.lowering.registry import TABLE, apply


def operands(*shape: int, dtype: torch.dtype = torch.float32, out: int = 5) -> list[Tensor]:
    """An input of this shape, a weight and a bias on the device."""
    random = torch.Generator().manual_seed(0)
    shapes = [shape, (out, shape[-1]), (out,)]
    return [torch.randn(each, generator=random).to("tpu", dtype).requires_grad_() for each in shapes]


def num_recorded() -> int:
    return torch.tpu.compile_stats()["ops_recorded"]


class Seen(TorchDispatchMode):
    """Sees each operation, for which autograd leaves them apart."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", ["strict", "fused"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(4, 6), (2, 3, 6), (700, 130)])
@pytest.mark.parametrize("has_bias", [True, False])
def test_gradients_are_those_of_the_products_and_the_sum(
    mode: str, dtype: torch.dtype, shape: tuple[int, ...], has_bias: bool
) -> None:
    def results(watcher: AbstractContextManager[object]) -> tuple[list[Tensor], int]:
        """The output and the gradients, and how many operations of the device the backward pass is."""
        given = operands(*shape, dtype=dtype)[: 3 if has_bias else 2]
        with watcher:
            output = F.linear(*given)
        gradient = torch.linspace(-1, 1, output.numel()).reshape(output.shape).to("tpu", dtype)
        torch.tpu.flush()
        before = num_recorded()
        with watcher:
            output.backward(gradient)
        num_operations = num_recorded() - before
        torch.tpu.flush()
        return [output.detach(), *(each.grad for each in given)], num_operations

    with torch.tpu.eager_mode(mode):
        found, num_operations = results(nullcontext())
        expected, num_without = results(Seen())
    assert num_operations == 1
    assert num_without == (3 if has_bias else 2)
    for each, other in zip(found, expected, strict=True):
        assert torch.equal(each, other)


@pytest.mark.parametrize("shape", [(4, 6), (2, 3, 6)])
@pytest.mark.parametrize("has_gradient", [True, False])
def test_a_layer_is_one_operation(shape: tuple[int, ...], has_gradient: bool) -> None:
    given = operands(*shape)
    torch.tpu.flush()
    before = num_recorded()
    with torch.set_grad_enabled(has_gradient):
        output = F.linear(*given)
    assert num_recorded() - before == 1
    assert output.requires_grad == has_gradient
    assert not output._is_view()
    torch.testing.assert_close(output.detach().cpu(), F.linear(*(each.detach().cpu() for each in given)))


def test_what_is_no_plain_layer_is_made_of_products() -> None:
    x, weight, bias = operands(4, 6)
    for given in ((x.detach().t().contiguous().t(), weight, bias), (x.detach()[0], weight, bias)):
        assert F.linear(*given).shape[-1] == 5
        assert F.linear(*given).grad_fn.name() != "LinearBackward0"
    with torch.inference_mode():
        on_cpu = F.linear(x.cpu(), weight.cpu(), bias.cpu())
        torch.testing.assert_close(F.linear(x, weight, bias).cpu(), on_cpu)
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        torch.ops.tpu.linear(x, weight[:, 1:], None)
    x, weight = x.detach().cpu(), weight.detach().cpu()
    assert torch.equal(torch.ops.tpu.linear(x, weight, None), F.linear(x, weight))


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 1), (0, 2), (1, 2)])
def test_only_what_is_wanted_is_computed_and_kept(wanted: tuple[int, ...]) -> None:
    given = operands(4, 6)
    for place, each in enumerate(given):
        each.requires_grad_(place in wanted)
    output = F.linear(*given)
    assert output.grad_fn.name() == "LinearBackward0"
    assert (output.grad_fn._saved_input is not None) == (1 in wanted)
    assert (output.grad_fn._saved_weight is not None) == (0 in wanted)
    output.sum().backward()
    on_cpu = [each.detach().cpu().requires_grad_(each.requires_grad) for each in given]
    F.linear(*on_cpu).sum().backward()
    for each, expected in zip(given, on_cpu, strict=True):
        assert (each.grad is not None) == expected.requires_grad
        if each.grad is not None:
            torch.testing.assert_close(each.grad.cpu(), expected.grad)


def test_a_gradient_that_is_a_view_and_a_layer_without_a_bias() -> None:
    x, weight, _ = operands(4, 6)
    F.linear(x, weight).t()[1:].sum().backward()
    expected = torch.ones(4, 5)
    expected[:, 0] = 0
    torch.testing.assert_close(weight.grad.cpu(), expected.t() @ x.detach().cpu())
    torch.testing.assert_close(x.grad.cpu(), expected @ weight.detach().cpu())


def test_gradients_of_gradients() -> None:
    given = operands(2, 2, 3, dtype=torch.float64, out=2)
    assert torch.autograd.gradcheck(F.linear, given)
    assert torch.autograd.gradgradcheck(F.linear, given)


def test_a_weight_that_was_written_since_is_refused() -> None:
    x, weight, bias = operands(4, 6)
    output = F.linear(x, weight, bias)
    with torch.no_grad():
        weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_transforms_take_it() -> None:
    x, weight, bias = (each.detach() for each in operands(4, 6))
    tangent = torch.ones_like(x)
    _, found = torch.func.jvp(lambda x: F.linear(x, weight, bias), (x,), (tangent,))
    torch.testing.assert_close(found, tangent @ weight.t())
    per_row = torch.func.vmap(torch.func.grad(lambda w, row: F.linear(row[None], w, bias).sum()), (None, 0))
    torch.testing.assert_close(per_row(weight, x), x[:, None].expand(4, 5, 6))
    parameter = weight.clone().requires_grad_()
    torch.func.vmap(lambda row: F.linear(row[None], parameter, bias))(x).sum().backward()
    torch.testing.assert_close(parameter.grad, x.sum(0).expand(5, 6))


def test_a_mode_sees_the_products() -> None:
    x, weight, bias = operands(4, 6)
    with Seen() as seen:
        F.linear(x, weight, bias).sum().backward()
    assert seen.names.count("aten::addmm") == 1
    assert seen.names.count("aten::mm") == 2
    output = F.linear(x, weight, bias)
    with Seen() as seen:  # of the backward alone
        output.sum().backward()
    assert seen.names.count("aten::mm") == 2
    assert "aten::linear_backward" not in seen.names


@pytest.mark.parametrize("dynamic", [True, None])
def test_a_compiled_layer_takes_batches_of_any_size(dynamic: bool | None) -> None:
    torch.compiler.reset()
    _, weight, bias = operands(4, 6)
    fast = torch.compile(F.linear, backend="tpu", dynamic=dynamic)
    for rows in (2, 5, 3):
        given = operands(rows, 6)[0]
        fast(given, weight, bias).sum().backward()
        found = [each.grad.cpu() for each in (given, weight, bias)]
        expected = [each.detach().cpu().requires_grad_() for each in (given, weight, bias)]
        F.linear(*expected).sum().backward()
        torch.testing.assert_close(found, [each.grad for each in expected])
        weight.grad = bias.grad = None


def test_on_a_tpu_a_sum_in_float16_overflows_only_where_it_is_too_large() -> None:
    x, weight, bias = (
        jnp.full((1, 6), 200, jnp.float16),
        jnp.full((1, 6), 60, jnp.float16),
        jnp.float16([-1e4]),
    )
    shaped = (jax.ShapeDtypeStruct((1, 1), jnp.float16),)
    with lowering_for("tpu"):
        (layer,) = apply(TABLE["tpu::linear"], [x, weight, bias], {}, shaped)
        (product,) = apply(TABLE["addmm"], [bias, x, weight.T], {}, shaped)
    assert layer.item() == product.item() == 62016  # what is next to 62000


def test_on_a_tpu_addmm_and_baddbmm_round_their_product_alone() -> None:
    """Half of the last place of bfloat16 is lost before the bias is added; factors are for float32."""
    x, weight = jnp.asarray([[256, 1]], jnp.bfloat16), jnp.asarray([[1, 1]], jnp.bfloat16)
    bias, shaped = jnp.asarray([1], jnp.bfloat16), (jax.ShapeDtypeStruct((1, 1), jnp.bfloat16),)
    with lowering_for("tpu"):
        (rounded,) = apply(TABLE["addmm"], [bias, x, weight.T], {}, shaped)
        (scaled,) = apply(TABLE["addmm"], [bias, x, weight.T], {"beta": 3}, shaped)
        batch = [each[None] for each in (bias[None], x, weight.T)]
        (batched,) = apply(TABLE["baddbmm"], batch, {}, (jax.ShapeDtypeStruct((1, 1, 1), jnp.bfloat16),))
        (layer,) = apply(TABLE["tpu::linear"], [x, weight, bias], {}, shaped)
    assert rounded.item() == batched.item() == layer.item() == 256
    assert scaled.item() == 260


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("has_bias", [True, False])
def test_a_tpu_s_products_join_no_rows(dtype: Any, has_bias: bool) -> None:
    """257 rows are no multiple of a tile's: joined with those of other samples they would be copied."""
    random = np.random.default_rng(0)
    x, weight, bias, grad = (
        jnp.asarray(random.standard_normal(dims), dtype) for dims in ((2, 257, 6), (5, 6), (5,), (2, 257, 5))
    )
    given = [x, weight, bias if has_bias else None]
    shapes = [jax.ShapeDtypeStruct(each.shape, dtype) for each in (grad, x, weight, bias)]

    def run(x: jax.Array, weight: jax.Array, bias: jax.Array | None) -> list[jax.Array | None]:
        wanted = [True, True, has_bias]
        output = apply(TABLE["tpu::linear"], [x, weight, bias], {}, (shapes[0],))
        spec = (shapes[1], shapes[2], shapes[3] if has_bias else None)
        return [*output, *apply(TABLE["linear_backward"], [x, grad, weight, wanted], {}, spec)]

    expected = run(*given)
    with lowering_for("tpu"):
        jaxpr = jax.make_jaxpr(run)(*given)
        found = run(*given)
    names = [equation.primitive.name for equation in jaxpr.eqns]
    assert names.count("dot_general") == 3
    assert "reshape" not in names
    for each, other in zip(found, expected, strict=True):
        assert (each is None) == (other is None)
        if each is not None:  # a product is rounded before the bias is added
            tolerance = 2.0**-7 if dtype == jnp.bfloat16 else 1e-5
            wide = np.asarray(other, np.float64)
            np.testing.assert_allclose(np.asarray(each, np.float64), wide, rtol=tolerance, atol=tolerance * 4)
    if dtype == jnp.bfloat16:
        products = [each for each in jaxpr.eqns if each.primitive.name == "dot_general"]
        assert all(each.outvars[0].aval.dtype == dtype for each in products)
