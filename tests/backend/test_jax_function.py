"""`jax_op`: JAX functions as PyTorch operators."""

import dataclasses
import enum
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.experimental import pallas as pl

from tpu_backend import jax_op


@jax_op
def rms_norm(x, scale, *, eps):
    """Root mean square norm over the last dim."""
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + eps) * scale


@jax_op
def sine_and_more(x, index):
    return {"sine": jnp.sin(x) * 2, "rest": (index + 1, x.sum())}


def _inputs(device, dtype=torch.float32, grad=True):
    generator = torch.Generator().manual_seed(0)
    shapes = ((4, 8), (8,))
    return [torch.randn(s, generator=generator).to(device, dtype).requires_grad_(grad) for s in shapes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("device", ["cpu", "tpu"])
def test_a_function_and_its_gradient_are_pytorchs(device, dtype):
    x, scale = _inputs(device, dtype)
    y = rms_norm(x, scale, eps=1e-6)
    assert (y.dtype, y.device.type) == (dtype, device)
    y.square().sum().backward()
    host, host_scale = _inputs("cpu", dtype)
    expected = torch.nn.functional.rms_norm(host, (8,), host_scale, eps=1e-6)
    expected.square().sum().backward()
    tolerance = (
        {"rtol": 0.05, "atol": 0.05} if dtype == torch.bfloat16 else {}
    )  # no float32 inside, as written
    torch.testing.assert_close(y.cpu(), expected, **tolerance)
    torch.testing.assert_close(x.grad.cpu(), host.grad, **tolerance)
    torch.testing.assert_close(scale.grad.cpu(), host_scale.grad, **tolerance)


@pytest.mark.parametrize("mode", ["debug", "strict", "fused"])
def test_a_call_is_one_entry_of_the_stream(mode):
    x, scale = _inputs("tpu")
    with torch.tpu.eager_mode(mode):
        rms_norm(x, scale, eps=1e-6)
        recorded = torch.tpu.compile_stats()["ops_recorded"]
        y = rms_norm(x, scale, eps=1e-6)
        assert torch.tpu.compile_stats()["ops_recorded"] - recorded == 1
        gradient = torch.ones_like(y)
        recorded = torch.tpu.compile_stats()["ops_recorded"]
        torch.autograd.grad(y, (x, scale), gradient)
        assert torch.tpu.compile_stats()["ops_recorded"] - recorded == 1


def test_a_training_step_with_it_is_one_program():
    x, scale = _inputs("tpu")
    optimizer = torch.optim.SGD([scale], lr=0.1)

    def step():
        optimizer.zero_grad()
        rms_norm((x * 2), scale, eps=1e-6).square().mean().backward()
        optimizer.step()
        torch.tpu.flush()

    for _ in range(3):
        step()
    before = torch.tpu.compile_stats()
    step()
    after = torch.tpu.compile_stats()
    assert after["segments_run"] - before["segments_run"] == 1
    assert after["compilations"] == before["compilations"]


@pytest.mark.parametrize("device", ["cpu", "tpu"])
def test_outputs_come_back_as_the_tree_that_was_returned(device):
    x = torch.ones(3, device=device, requires_grad=True)
    out = sine_and_more(x, torch.arange(3, device=device))
    assert list(out) == ["rest", "sine"]
    index, total = out["rest"]
    assert (index.tolist(), index.dtype) == ([1, 2, 3], torch.int32)  # JAX's rules: no 64-bit integers
    assert not index.requires_grad
    (total * 2).backward()
    assert x.grad.tolist() == [2, 2, 2]


def test_derivatives_of_every_kind():
    x, scale = _inputs("tpu", torch.float64)

    def function(x, scale):
        return rms_norm(x, scale, eps=1e-6)

    x = x[:1, :2].detach().requires_grad_()
    scale = scale[:2].detach().requires_grad_()
    assert torch.autograd.gradcheck(function, (x, scale), check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(function, (x, scale), fast_mode=True)


@pytest.mark.parametrize("device", ["cpu", "tpu"])
def test_gradients_of_complex_numbers_are_conjugated_as_pytorchs(device):
    product = jax_op(lambda z: z * z * jnp.conj(z))
    z = torch.tensor([1 + 2j, -0.5j, 3], dtype=torch.complex128, device=device, requires_grad=True)
    assert torch.autograd.gradcheck(product, (z,))


def test_torch_func_goes_through():
    x, scale = _inputs("tpu", torch.float64, grad=False)

    def function(row):
        return rms_norm(row, scale, eps=1e-6)

    torch.testing.assert_close(torch.func.vmap(function)(x), function(x))
    torch.testing.assert_close(torch.func.vmap(function, in_dims=1, out_dims=1)(x.t()), function(x).t())
    per_row = torch.func.vmap(torch.func.grad(lambda row: function(row).sum()))(x)
    torch.testing.assert_close(per_row, torch.func.grad(lambda x: function(x).sum())(x))
    reverse, forward = torch.func.jacrev(function)(x[0]), torch.func.jacfwd(function)(x[0])
    torch.testing.assert_close(reverse, forward)
    sine = torch.func.hessian(lambda x: sine_and_more(x, x)["sine"].sum())(x[0])
    torch.testing.assert_close(sine, torch.diag(-2 * x[0].sin()))


def test_a_custom_vjp_is_used():
    @jax.custom_vjp
    def pretend(x):
        return x * 2

    pretend.defvjp(lambda x: (x * 2, None), lambda _, gradient: (gradient * 100,))
    x = torch.ones(2, device="tpu", requires_grad=True)
    jax_op(pretend)(x).sum().backward()
    assert x.grad.tolist() == [100, 100]


def test_a_pallas_kernel_is_an_operator():
    def kernel(x_ref, y_ref, out_ref):
        out_ref[...] = x_ref[...] * y_ref[...] + 1

    def multiply(x, y):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return pl.pallas_call(kernel, out_shape=shape, interpret=True)(x, y)

    x, y = torch.randn(8, 128), torch.randn(8, 128)
    # XLA rounds once where PyTorch rounds twice, so a sum near 0 has no relative tolerance alone.
    torch.testing.assert_close(jax_op(multiply)(x.to("tpu"), y.to("tpu")).cpu(), x * y + 1)


def test_each_set_of_static_values_is_a_function_of_its_own():
    power = jax_op(lambda x, *, exponent: x**exponent, name="power")
    x = torch.full((2,), 3.0, device="tpu")
    assert [power(x, exponent=e)[0].item() for e in (1, 2, 3, 2)] == [3, 9, 27, 9]


def test_a_number_on_the_cpu_may_stand_beside_device_tensors():
    scale = jax_op(lambda x, factor: x * factor)
    factor = torch.tensor(3.0, requires_grad=True)
    y = scale(torch.ones(2, device="tpu"), factor)
    y.sum().backward()
    assert (y.tolist(), factor.grad.item(), factor.grad.device.type) == ([3, 3], 2, "cpu")


def test_the_function_sees_the_dtypes_that_jax_gives():
    seen = []

    def record(*arrays):
        seen.append([str(each.dtype) for each in (*arrays, jnp.zeros(2), jnp.arange(2))])
        return arrays[0]

    function = jax_op(record)
    function(torch.ones(2, device="tpu"), torch.arange(2, device="tpu"))
    function(torch.ones(2, device="tpu", dtype=torch.float64), torch.arange(2, device="tpu"))
    assert seen[0] == ["float32", "int32", "float32", "int32"]
    assert ["float64", "int64", "float64", "int64"] in seen


def test_views_and_results_do_not_alias():
    identity = jax_op(lambda x: x, name="same")
    for device in ("cpu", "tpu"):
        x = torch.arange(6.0, device=device).reshape(2, 3)
        y = identity(x.t())
        x.zero_()
        assert y.tolist() == [[0, 3], [1, 4], [2, 5]]


def test_a_compiled_function_breaks_its_graph_there():
    compiled = torch.compile(lambda x: sine_and_more(x + 1, x)["sine"].sum() * 2, backend="eager")
    x = torch.ones(3)
    torch.testing.assert_close(compiled(x), (2 * (x + 1).sin()).sum() * 2)


def test_an_operator_has_its_functions_name_in_profiles_and_errors():
    x, scale = _inputs("tpu")
    with torch.profiler.profile() as profile:
        rms_norm(x, scale, eps=1e-6)
    assert any(event.key.startswith("tpu_jax::rms_norm") for event in profile.key_averages())
    assert repr(rms_norm) == "<jax_op rms_norm>"
    assert rms_norm.__doc__ == "Root mean square norm over the last dim."


def test_wrong_arguments_are_told():
    x, scale = _inputs("tpu")
    with pytest.raises(
        TypeError, match="rms_norm: positional argument 1 is float; tensors are given by position"
    ):
        rms_norm(x, 2.0, eps=1e-6)
    with pytest.raises(TypeError, match=r"rms_norm: static values must be hashable: .*list"):
        rms_norm(x, scale, eps=[1e-6])
    with pytest.raises(TypeError, match="rms_norm: expected at least one tensor"):
        rms_norm(eps=1e-6)
    with pytest.raises(ValueError, match="Incompatible shapes for broadcasting"):
        rms_norm(x, scale[:3], eps=1e-6)
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        rms_norm(x, scale.cpu(), eps=1e-6)
    with pytest.raises(TypeError, match="eps"):
        rms_norm(x, scale)
    assert rms_norm(x, scale, eps=1e-6).shape == (4, 8), "an error left the operator unusable"


def test_no_fallback_serves_it():
    torch.tpu.reset_fallback_stats()
    for x, scale in itertools.repeat(_inputs("tpu"), 2):
        rms_norm(x, scale, eps=1e-5).sum().backward()
    assert torch.tpu.fallback_stats() == {}


@dataclasses.dataclass(frozen=True)
class Scale:
    by: float


def test_static_values_are_told_apart_by_type_and_bits():
    """What Python takes for equal may be three values: the function sees each as it was given."""
    seen = []

    def note(x, *, value):
        seen.append(repr(value))
        return x + 1

    operator = jax_op(note, name="noting")
    nan = float("nan")
    values = [2, 2.0, True, 1, 0.0, -0.0, False, 0, nan, -nan, np.float32(2), np.int64(2), 2 + 0j]
    values += [
        (2,),
        (2.0,),
        ((True,), 1),
        ((1,), True),
        frozenset({1}),
        frozenset({True}),
        Scale(2),
        Scale(2.0),
    ]
    values += [(0.0, nan), (-0.0, nan), Kind.ONE]
    for value in values:
        del seen[:]
        operator(torch.zeros(2, device="tpu"), value=value)
        assert set(seen) == {repr(value)}, "made for it, and not for what is equal to it"
    num_operators = len(operator._operators)
    assert num_operators == len(values)
    for value in [*values, float("nan"), (0.0, float("nan"))]:
        operator(torch.zeros(2, device="tpu"), value=value)
    assert len(operator._operators) == num_operators, "a NaN is the one before"


class Kind(enum.IntEnum):
    ONE = 1


@pytest.mark.parametrize("device", ["cpu", "tpu"])
def test_the_sign_of_a_static_zero_counts_forward_and_backward(device):
    operator = jax_op(lambda x, *, by: x * (1 / by if isinstance(by, int) else jnp.copysign(2.0, by)))
    for by, expected in ((0.0, 2.0), (-0.0, -2.0), (1, 1.0), (1.0, 2.0)):
        x = torch.ones(3, device=device, requires_grad=True)
        y = operator(x, by=by)
        y.sum().backward()
        assert y.tolist() == [expected] * 3
        assert x.grad.tolist() == [expected] * 3


def test_static_values_must_be_hashable():
    with pytest.raises(TypeError, match="static values must be hashable"):
        rms_norm(*_inputs("tpu"), eps=[1e-6])
