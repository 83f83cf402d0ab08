"""Tensors on their way: copies of every kind, exact dtypes, files, copied models, and the CPU left alone."""

import copy
import io
import pickle

import numpy as np
import pytest
import torch
from torch import nn

from tputrain.models import Llama, LlamaConfig

FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64]
INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]


# ---- host to device to host --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS + INTEGERS, ids=str)
def test_a_round_trip_is_exact(dtype):
    host = (torch.randn(3, 4) * 10).to(dtype)
    device = host.to("tpu")
    assert (device.dtype, device.shape, device.stride()) == (host.dtype, host.shape, host.stride())
    assert torch.equal(device.cpu(), host)
    assert torch.equal(device.to("cpu", copy=True), host)
    assert device.tolist() == host.tolist()


def test_extreme_values_survive():
    for host in (
        torch.tensor([2**53 + 1, -(2**63), 2**63 - 1]),
        torch.tensor([2**31 - 1, -(2**31)], dtype=torch.int32),
        torch.tensor([1 + 2**-52, 5e-324, 1.7976931348623157e308], dtype=torch.float64),
        torch.tensor([1e-45, 3.4028235e38, float("inf"), -0.0]),
        torch.tensor([1e-40, 3.3895e38, -0.0], dtype=torch.bfloat16),
    ):
        assert torch.equal(host.to("tpu").cpu(), host)
        assert torch.equal(host.to("tpu").clone().cpu().view(torch.uint8), host.view(torch.uint8))
    assert torch.tensor([float("nan")]).to("tpu").isnan().item()


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.t(),
        lambda x: x[::2],
        lambda x: x[:, 1:3],
        lambda x: x[1],
        lambda x: x[:0],
        lambda x: x[None].expand(3, 4, 6),
        lambda x: x.permute(1, 0)[2:],
        lambda x: x.unfold(1, 3, 2),
        lambda x: x[0, 0],
    ],
)
def test_views_are_copied_both_ways(view):
    host = torch.arange(24.0).reshape(4, 6)
    assert torch.equal(view(host).to("tpu").cpu(), view(host))
    assert torch.equal(view(host.to("tpu")).cpu(), view(host))


@pytest.mark.parametrize(
    "view",
    [lambda x: x.t(), lambda x: x[::2], lambda x: x[:, 1:3], lambda x: x[1], lambda x: x.permute(1, 0)[2:]],
)
def test_views_are_written_from_either_side(view):
    host = torch.arange(24.0).reshape(4, 6)
    expected, on_device, on_host = torch.zeros(4, 6), torch.zeros(4, 6, device="tpu"), torch.zeros(4, 6)
    view(expected).copy_(view(host))
    view(on_device).copy_(view(host))
    view(on_host).copy_(view(host.to("tpu")))
    assert torch.equal(on_device.cpu(), expected)
    assert torch.equal(on_host, expected)


def test_channels_last_keeps_its_memory_order():
    host = torch.arange(48.0).reshape(1, 3, 4, 4).to(memory_format=torch.channels_last)
    device = host.to("tpu")
    assert device.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(device.cpu(), host)
    assert (device + 1).is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(device.contiguous().cpu(), host.contiguous())


def test_copies_on_the_device_change_dtype():
    host = torch.tensor([1.7, -2.3, 300.0])
    device = host.to("tpu")
    for dtype in (torch.float64, torch.bfloat16, torch.int64, torch.int32, torch.bool):
        assert torch.equal(device.to(dtype).cpu(), host.to(dtype))
        target = torch.empty(3, dtype=dtype, device="tpu")
        assert torch.equal(target.copy_(device).cpu(), host.to(dtype))
    assert torch.equal(host.to("tpu", torch.bfloat16).cpu(), host.bfloat16())
    assert torch.equal(device.to("cpu", torch.int64), host.long())
    wide = torch.empty(2, 3, dtype=torch.float64, device="tpu")
    assert torch.equal(wide.copy_(device).cpu(), host.double().expand(2, 3))


def test_to_makes_no_copy_where_nothing_changes():
    device = torch.ones(3, device="tpu")
    assert device.to("tpu") is device
    assert device.to("tpu:0", torch.float32) is device
    assert device.to("tpu", copy=True) is not device


# ---- who owns the memory -----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [4, 4096])  # XLA on the CPU may keep the memory of large aligned arrays
def test_writing_the_host_tensor_afterwards_does_not_reach_the_device(size):
    host = torch.ones(size)
    device = host.to("tpu")
    host.fill_(5)
    assert device.sum().item() == size
    target = torch.zeros(size, device="tpu")
    target.copy_(host, non_blocking=True)
    host.fill_(7)
    assert target.sum().item() == 5 * size
    shared = np.ones(size, np.float32)
    device = torch.from_numpy(shared).to("tpu")
    shared[:] = 9
    assert device.sum().item() == size


@pytest.mark.parametrize("size", [4, 4096])
def test_writing_either_side_of_a_read_does_not_reach_the_other(size):
    device = torch.ones(size, device="tpu")
    host = device.cpu()
    host.fill_(3)
    assert device.sum().item() == size
    first = device.cpu()
    device.add_(1)
    torch.tpu.synchronize()
    assert first.sum().item() == size
    assert device.sum().item() == 2 * size
    array = device.cpu().numpy()
    array[0] = 100
    assert device[0].item() == 2
    assert device.cpu().data_ptr() != device.cpu().data_ptr()


def test_a_clone_and_its_source_are_written_apart():
    first = torch.ones(4, device="tpu")
    second, third = first.clone(), torch.empty_like(first).copy_(first)
    first.add_(1)
    second.mul_(5)
    assert (first.tolist(), second.tolist(), third.tolist()) == ([2] * 4, [5] * 4, [1] * 4)


# ---- arithmetic that must not lose bits --------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["strict", "fused"])
def test_int64_is_exact_and_wraps(mode):
    host = torch.tensor([2**53 + 1, 2**62, -(2**63), 3])
    with torch.tpu.eager_mode(mode):
        device = host.to("tpu")
        assert torch.equal((device + device).cpu(), host + host)  # 2**62 + 2**62 wraps
        assert torch.equal((device * 3 - 1).cpu(), host * 3 - 1)
        assert torch.equal((device + (2**53 + 1)).cpu(), host + (2**53 + 1))
        assert torch.equal((device // 7).cpu(), host // 7)
        assert torch.equal((device % 10).cpu(), host % 10)
        assert torch.equal((device >> 3).cpu(), host >> 3)
        assert torch.equal((device ^ (2**60 + 1)).cpu(), host ^ (2**60 + 1))
        assert device.sum().item() == host.sum().item()
        assert device.max().item() == 2**62
        assert torch.equal(torch.full((4,), 2**53 + 1, device="tpu").cpu(), torch.full((4,), 2**53 + 1))
        assert torch.arange(2**53, 2**53 + 3, device="tpu").tolist() == [2**53, 2**53 + 1, 2**53 + 2]


@pytest.mark.parametrize("mode", ["strict", "fused"])
def test_int32_and_bool_are_exact(mode):
    host = torch.tensor([2**31 - 1, -(2**31), 17], dtype=torch.int32)
    flags = torch.tensor([True, False, True])
    with torch.tpu.eager_mode(mode):
        device, device_flags = host.to("tpu"), flags.to("tpu")
        assert torch.equal((device + 1).cpu(), host + 1)
        assert (device + 1).dtype == torch.int32
        assert torch.equal((device * device).cpu(), host * host)
        assert (device.sum().dtype, device.sum().item()) == (torch.int64, host.sum().item())
        assert torch.equal((device / 2).cpu(), host / 2)
        assert torch.equal((device_flags & ~device_flags.flip(0)).cpu(), flags & ~flags.flip(0))
        assert (device_flags.sum().item(), device_flags.any().item(), device_flags.all().item()) == (
            2,
            True,
            False,
        )
        assert torch.equal((device_flags * 3).cpu(), flags * 3)
        assert torch.equal((device_flags + device_flags).cpu(), flags + flags)


@pytest.mark.parametrize("mode", ["strict", "fused"])
def test_float64_keeps_its_precision(mode):
    host = torch.tensor([1 / 3, 1e-17, 1e300], dtype=torch.float64)
    with torch.tpu.eager_mode(mode):
        device = host.to("tpu")
        assert torch.equal((device * 3).cpu(), host * 3)
        assert torch.equal((device + 1e-17).cpu(), host + 1e-17)
        assert torch.equal((device * torch.tensor(1 / 3, dtype=torch.float64)).cpu(), host * (1 / 3))
        torch.testing.assert_close(device.sqrt().cpu(), host.sqrt(), rtol=1e-15, atol=0)
        torch.testing.assert_close(device[:2].exp().cpu(), host[:2].exp(), rtol=1e-15, atol=0)
        matrix = host[:2].outer(host[:2])
        torch.testing.assert_close(
            (matrix.to("tpu") @ matrix.to("tpu")).cpu(), matrix @ matrix, rtol=1e-15, atol=0
        )
        assert (device.float() + host.to("tpu")).dtype == torch.float64
        assert torch.full((1,), 0.1, dtype=torch.float64, device="tpu").item() == 0.1
        assert torch.linspace(0, 1, 4, dtype=torch.float64, device="tpu")[1].item() == 1 / 3


PROMOTED = [torch.int64, torch.int32, torch.float32, torch.bool, torch.bfloat16]


@pytest.mark.parametrize("dtype", PROMOTED, ids=str)
def test_numbers_promote_as_on_the_cpu(dtype):
    host = torch.tensor([3.5, 0.0]).to(dtype)
    device = host.to("tpu")
    for function in (
        lambda x: x + 1,
        lambda x: x * 2.5,
        lambda x: x / 2,
        lambda x: x > 1,
        lambda x: x + torch.tensor(2),
        lambda x: 1 - x.float(),
    ):
        expected, actual = function(host), function(device)
        assert actual.dtype == expected.dtype
        assert torch.equal(actual.cpu(), expected)


# ---- models and files --------------------------------------------------------------------------------------


def test_tied_weights_stay_tied():
    embedding, head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
    head.weight = embedding.weight
    model = nn.Sequential(embedding, head).to("tpu")
    assert model[0].weight is model[1].weight
    assert model[0].weight.data_ptr() == model[1].weight.data_ptr()
    assert len(list(model.parameters())) == 1
    with torch.no_grad():
        model[0].weight.fill_(2)
    assert (model[1].weight == 2).all().item()
    model(torch.tensor([1, 2]).to("tpu")).sum().backward()
    assert model[0].weight.grad is model[1].weight.grad
    copied = copy.deepcopy(model)
    assert copied[0].weight is copied[1].weight
    assert model.cpu()[0].weight is model[1].weight


def test_a_llama_with_tied_embeddings_has_one_matrix_on_the_device():
    model = Llama(LlamaConfig(32, 16, 32, 1, 4, 2, 4, 16)).to("tpu")
    assert model.output_weight is model.model.embed_tokens.weight
    assert model.output_weight.is_tpu
    assert "lm_head.weight" not in dict(model.named_parameters())


def _saved(value: object) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file


def test_files_are_loaded_wherever_they_should_go():
    host = {
        "a": torch.arange(6.0).reshape(2, 3),
        "b": torch.tensor([1, 2**60]),
        "c": torch.ones(2, dtype=torch.bfloat16),
    }
    device = {name: tensor.to("tpu") for name, tensor in host.items()}
    for file, map_location, expected in (
        (_saved(device), None, "tpu"),
        (_saved(device), "cpu", "cpu"),
        (_saved(device), {"tpu:0": "cpu"}, "cpu"),
        (_saved(host), "tpu", "tpu"),
        (_saved(host), torch.device("tpu", 0), "tpu"),
        (_saved(host), None, "cpu"),
        (_saved(host), lambda storage, _: storage.tpu(), "tpu"),
    ):
        loaded = torch.load(file, map_location=map_location)
        for name, tensor in host.items():
            assert loaded[name].device.type == expected, (map_location, name)
            assert loaded[name].dtype == tensor.dtype
            assert torch.equal(loaded[name].cpu(), tensor)


def test_views_of_one_storage_stay_so_in_a_file():
    whole = torch.arange(6.0).to("tpu")
    loaded = torch.load(_saved([whole, whole[2:4]]))
    loaded[1].fill_(9)
    assert loaded[0].tolist() == [0, 1, 9, 9, 4, 5]


def test_a_state_dict_goes_through_a_file_to_the_cpu_and_back():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).to("tpu")
    model(torch.randn(5, 3).to("tpu")).sum().backward()
    host = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    host.load_state_dict(torch.load(_saved(model.state_dict()), map_location="cpu"))
    again = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).to("tpu")
    again.load_state_dict(host.state_dict())
    for name, tensor in model.state_dict().items():
        assert torch.equal(host.state_dict()[name], tensor.cpu())
        assert torch.equal(again.state_dict()[name].cpu(), tensor.cpu())


def test_pickle_and_deepcopy_keep_device_and_value():
    tensor = torch.arange(3.0).to("tpu")
    parameter = nn.Parameter(tensor.clone())
    for copied in (copy.deepcopy(tensor), pickle.loads(pickle.dumps(tensor)), copy.deepcopy(parameter)):
        assert copied.is_tpu
        assert copied.tolist() == [0, 1, 2]
    assert isinstance(copy.deepcopy(parameter), nn.Parameter)


def test_numpy_goes_by_way_of_the_cpu():
    device = torch.arange(3.0).to("tpu")
    assert np.array_equal(device.cpu().numpy(), np.arange(3, dtype=np.float32))
    assert np.array_equal(device.numpy(force=True), np.arange(3, dtype=np.float32))
    assert torch.as_tensor(np.arange(3), device="tpu").tolist() == [0, 1, 2]
    with pytest.raises(TypeError, match=r"Tensor\.cpu"):
        np.asarray(device)


def test_subclasses_and_hooks_work():
    seen = []
    x = torch.ones(2, device="tpu", requires_grad=True)
    x.register_hook(lambda gradient: seen.append(gradient.device.type))
    (x * 3).sum().backward()
    assert seen == ["tpu"]
    module = nn.Linear(2, 2).to("tpu")
    module.register_forward_hook(lambda module, args, output: output * 0)
    assert module(x).sum().item() == 0


# ---- the CPU is left alone ---------------------------------------------------------------------------------


def test_cpu_tensors_and_generators_are_left_alone():
    torch.manual_seed(5)
    expected = torch.randn(3)
    torch.manual_seed(5)
    torch.randn(3, device="tpu")
    assert torch.equal(torch.randn(3), expected), "a draw on the device moved the CPU's generator"
    assert (torch.ones(3) + 1).device.type == "cpu"


def test_torch_compile_on_cpu_tensors_is_left_alone():
    @torch.compile(backend="aot_eager", fullgraph=True)
    def function(x: torch.Tensor) -> torch.Tensor:
        return (x.sin() * 2).sum()

    x = torch.ones(3, requires_grad=True)
    function(x).backward()
    torch.testing.assert_close(x.grad, 2 * torch.ones(3).cos())


def test_mixing_a_number_on_the_cpu_is_allowed():
    assert (torch.ones(2, device="tpu") * torch.tensor(3.0)).tolist() == [3, 3]
    assert (torch.tensor(2) + torch.ones(2, device="tpu")).tolist() == [3, 3]
    x = torch.zeros(3, device="tpu")
    x[1] = torch.tensor(4.0)
    x[torch.tensor([0, 2])] = 5.0  # an index on the CPU
    assert x.tolist() == [5, 4, 5]
