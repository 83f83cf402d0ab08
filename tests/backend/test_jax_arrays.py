"""Tensors as JAX arrays and back: no copy, and nobody's array is ever given away."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

from tests.backend.fresh_process import run_python
from tpu_backend import from_jax, to_jax

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.bool, torch.complex64]


def _memory(array: jax.Array) -> int:
    return array.unsafe_buffer_pointer()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_and_dtypes_go_there_and_back(dtype):
    host = (torch.arange(6).reshape(2, 3) - 2).to(dtype)
    array = to_jax(host.to("tpu"))
    assert array.shape == (2, 3)
    assert str(array.dtype) == str(dtype).removeprefix("torch.")
    back = from_jax(array)
    assert (back.dtype, back.shape, back.is_tpu) == (dtype, (2, 3), True)
    assert torch.equal(back.cpu(), host)


def test_nothing_is_copied():
    tensor = torch.arange(6.0, device="tpu").reshape(2, 3) + 1
    array = to_jax(tensor)
    assert to_jax(tensor) is array
    assert _memory(to_jax(from_jax(array))) == _memory(array)


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.t(),
        lambda x: x[1:],
        lambda x: x[:, ::2],
        lambda x: x.view(-1),
        lambda x: x[0, 1],
        lambda x: x[:1].expand(3, 4),
        lambda x: x.view(torch.int32),
        lambda x: x.as_strided((3, 2), (1, 1), 2),
        lambda x: torch.view_as_complex(x.view(2, 2, 2)).conj(),
        lambda x: x[:0],
    ],
)
def test_views_are_read_into_arrays_of_their_own(view):
    host = torch.arange(8.0).reshape(2, 4)
    array = to_jax(view(host.to("tpu")))
    assert array.shape == view(host).shape
    assert np.array_equal(np.asarray(array), view(host).resolve_conj().numpy())


def test_what_is_pending_is_computed_and_what_was_never_written_is_something():
    tensor = torch.ones(3, device="tpu")
    assert to_jax(tensor * 2 + 1).tolist() == [3, 3, 3]
    assert to_jax(torch.empty(2, 3, device="tpu")).shape == (2, 3)


@pytest.mark.parametrize("mode", ["strict", "fused"])
def test_an_array_keeps_its_values_whatever_is_written_to_the_tensor(mode):
    with torch.tpu.eager_mode(mode):
        tensor = torch.arange(4.0, device="tpu") + 0
        array = to_jax(tensor)
        tensor.mul_(2)
        tensor[1:3] = 9
        torch.tpu.synchronize()
        assert array.tolist() == [0, 1, 2, 3]
        imported = from_jax(array)
        imported.add_(1)
        imported.add_(1)
        assert imported.tolist() == [2, 3, 4, 5]
        assert array.tolist() == [0, 1, 2, 3]
    assert tensor.tolist() == [0, 9, 9, 6]


def _training_step():
    torch.manual_seed(0)
    model = nn.Linear(3, 3).to("tpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    inputs = torch.ones(2, 3).to("tpu")

    def step():
        optimizer.zero_grad()
        model(inputs).square().sum().backward()
        optimizer.step()
        torch.tpu.synchronize()

    return model, optimizer, step


@pytest.mark.parametrize("still_held", [True, False])
def test_a_step_after_to_jax_of_a_parameter_leaves_the_array_alone_and_compiles_nothing(still_held):
    model, optimizer, step = _training_step()
    for _ in range(3):
        step()
    array = to_jax(model.weight)
    moment = to_jax(optimizer.state[model.weight]["exp_avg"])
    # An array over the same memory that the device knows nothing of, alone or beside the one it gave away.
    alias = jax.device_put(array, array.sharding)
    assert _memory(alias) == _memory(array)
    before = alias.tolist(), moment.tolist()
    if not still_held:
        del array
    compilations = torch.tpu.compile_stats()["compilations"]
    for _ in range(3):
        step()
    assert torch.tpu.compile_stats()["compilations"] == compilations
    assert (alias.tolist(), moment.tolist()) == before
    assert not alias.is_deleted()
    assert model.weight.tolist() != before[0]


def test_steps_are_the_same_whether_or_not_somebody_looks():
    results = []
    for looks in (False, True):
        model, _, step = _training_step()
        held = []
        for _ in range(4):
            step()
            if looks:
                held.append(to_jax(model.weight))
        results.append(model.weight.tolist())
    assert results[0] == results[1]


def test_a_parameter_made_of_an_array_trains_and_the_array_stays():
    array = jnp.ones((3, 3)) * 2
    model = nn.Linear(3, 3, bias=False).to("tpu")
    model.weight = nn.Parameter(from_jax(array))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        model(torch.ones(2, 3).to("tpu")).sum().backward()
        optimizer.step()
    assert array.tolist() == [[2] * 3] * 3
    assert model.weight.max().item() < 2


def test_an_array_of_another_memory_order_is_put_in_order():
    from jax.experimental.layout import Format, Layout

    array = jnp.arange(6.0).reshape(2, 3)
    turned = jax.device_put(array, Format(Layout(major_to_minor=(1, 0)), array.sharding))
    assert turned.format.layout.major_to_minor == (1, 0)
    tensor = from_jax(turned)
    assert (tensor + 1).tolist() == [[1, 2, 3], [4, 5, 6]]


def test_dlpack_and_numpy_go_by_way_of_the_array():
    tensor = torch.arange(6.0, device="tpu").reshape(2, 3)
    assert np.from_dlpack(to_jax(tensor)).tolist() == tensor.tolist()
    assert torch.from_dlpack(to_jax(tensor)).tolist() == tensor.tolist()
    assert torch.from_dlpack(jnp.arange(3.0)).tolist() == [0, 1, 2]
    host = torch.arange(4.0)
    imported = from_jax(jax.dlpack.from_dlpack(host))
    imported.add_(1)
    assert imported.tolist() == [1, 2, 3, 4]
    assert host.tolist() == [0, 1, 2, 3]
    for use in (jnp.from_dlpack, np.from_dlpack, torch.from_dlpack):
        with pytest.raises(
            (ValueError, RuntimeError, BufferError), match=r"Unknown device type tpu|Unsupported device"
        ):
            use(tensor)


def test_64_bit_types_need_no_switch():
    assert not jax.config.jax_enable_x64
    assert to_jax(torch.tensor([2**53 + 1], device="tpu")).tolist() == [2**53 + 1]
    assert to_jax(torch.tensor([[1 / 3], [0.1]], dtype=torch.float64, device="tpu").t()).tolist() == [
        [1 / 3, 0.1]
    ]


def test_what_is_no_tpu_tensor_is_refused():
    with pytest.raises(TypeError, match="to_jax: expected a tpu tensor, got a tensor on cpu; move it first"):
        to_jax(torch.ones(2))
    with pytest.raises(TypeError, match="to_jax: expected a tpu tensor, got int"):
        to_jax(3)


def test_what_is_no_array_of_the_device_is_refused():
    with pytest.raises(TypeError, match=r"from_jax: expected a concrete jax\.Array, got ndarray"):
        from_jax(np.ones(2))
    with pytest.raises(TypeError, match=r"from_jax: expected a concrete jax\.Array, got .*Tracer"):
        jax.jit(from_jax)(jnp.ones(2))
    with pytest.raises(TypeError, match="from_jax: PyTorch has no dtype for int4; convert it first"):
        from_jax(jnp.ones(2, jnp.int4))
    with pytest.raises(TypeError, match="from_jax: PyTorch has no dtype for key<fry>; convert it first"):
        from_jax(jax.random.key(0))
    deleted = jnp.ones(2)
    deleted.delete()
    with pytest.raises(ValueError, match="from_jax: the array is deleted"):
        from_jax(deleted)


def test_an_array_elsewhere_is_refused():
    done = run_python(
        """
        import jax, jax.numpy as jnp, torch, tpu_backend
        from tpu_backend import jax_arrays
        from tpu_backend.runtime.platform import Platform
        def refuse(array):
            try:
                tpu_backend.from_jax(array)
            except ValueError as error:
                print(error)
        array = jnp.ones(2, device=jax.devices()[1])
        sharding = jax.NamedSharding(jax.make_mesh((2,), "x"), jax.P("x"))
        refuse(array)
        refuse(jax.device_put(jnp.ones(2), sharding))
        jax_arrays.platform = lambda: Platform("cuda", "a host of two GPUs", tuple(jax.devices()))
        refuse(array)
        """,
        XLA_FLAGS="--xla_force_host_platform_device_count=2",
        JAX_PLATFORMS="cpu",
    )
    assert done.returncode == 0, done.stderr
    alone, both, second = done.stdout.splitlines()
    assert (
        alone
        == second
        == ("from_jax: the array is on cpu:1, tpu:0 is cpu:0; move it first: jax.device_put(array, device)")
    )
    assert "the array is on cpu:0, cpu:1, tpu:0 is" in both
