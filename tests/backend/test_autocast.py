"""Autocast to bfloat16: the dtypes and, within its precision, the numbers of the CPU's autocast."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4))


@pytest.fixture(scope="module")
def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(6, 8, generator=generator), torch.randint(0, 4, (6,), generator=generator)


def test_the_ops_of_a_forward_pass_have_their_dtypes(model, batch):
    device_model, x = model.to("tpu"), batch[0].to("tpu")
    with torch.autocast("tpu", dtype=torch.bfloat16):
        assert torch.is_autocast_enabled("tpu")
        assert device_model(x).dtype == torch.bfloat16
        assert (x @ x.t()).dtype == torch.bfloat16
        assert F.linear(x, x).dtype == torch.bfloat16
        assert torch.baddbmm(x[None, :, :6], x[None], x.t()[None]).dtype == torch.bfloat16
        assert F.scaled_dot_product_attention(x[None], x[None], x[None]).dtype == torch.bfloat16
        half = x @ x.t()
        assert F.softmax(half, -1).dtype == torch.float32
        assert F.cross_entropy(half, batch[1].to("tpu")).dtype == torch.float32
        assert half.exp().dtype == torch.float32
        assert half.pow(2).dtype == torch.float32
        assert F.layer_norm(half, (6,)).dtype == torch.float32
        assert F.mse_loss(half, x[:, :6]).dtype == torch.float32
        assert torch.cat([half, x[:, :6]]).dtype == torch.float32
        assert (half + x[:, :6]).dtype == torch.float32
        assert F.relu(half).dtype == torch.bfloat16
        with torch.autocast("tpu", enabled=False):
            assert (x @ x.t()).dtype == torch.float32
        assert (x.double() @ x.double().t()).dtype == torch.float64
    assert not torch.is_autocast_enabled("tpu")
    assert device_model(x).dtype == torch.float32


def test_the_default_dtype_is_bfloat16():
    assert torch.get_autocast_dtype("tpu") == torch.bfloat16
    x = torch.ones(8, 8, device="tpu")
    with torch.autocast("tpu"):
        assert (x @ x).dtype == torch.bfloat16
    with torch.amp.autocast("tpu", dtype=torch.float16):
        assert (x @ x).dtype == torch.float16


@pytest.mark.parametrize("mode", ["strict", "fused"])
def test_losses_and_gradients_are_near_those_of_the_cpu(mode, model, batch):
    results = {}
    for device in ("cpu", "tpu"):
        moved = model.to(device)
        moved.zero_grad()
        with torch.tpu.eager_mode(mode), torch.autocast(device, dtype=torch.bfloat16):
            loss = F.cross_entropy(moved(batch[0].to(device)), batch[1].to(device))
            assert loss.dtype == torch.float32
        loss.backward()
        gradients = [parameter.grad for parameter in moved.parameters()]
        assert all(gradient.dtype == torch.float32 for gradient in gradients)
        results[device] = (loss.item(), [gradient.cpu().clone() for gradient in gradients])
    assert results["tpu"][0] == pytest.approx(results["cpu"][0], rel=1e-2)
    torch.testing.assert_close(results["tpu"][1], results["cpu"][1], rtol=5e-2, atol=5e-3)


def test_weights_are_cast_once_a_pass(model, batch):
    """PyTorch caches the bfloat16 copy of a parameter for the time of the context."""
    device_model, x = model.to("tpu"), batch[0].to("tpu")
    torch.tpu.flush()
    counts = []
    with torch.autocast("tpu"):
        for _ in range(2):
            before = torch.tpu.compile_stats()["ops_recorded"]
            device_model(x)
            counts.append(torch.tpu.compile_stats()["ops_recorded"] - before)
    assert counts[0] - counts[1] == 4  # two weights and two biases


def test_a_grad_scaler_steps_and_skips():
    parameter = nn.Parameter(torch.ones(4, device="tpu"))
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    scaler = torch.amp.GradScaler("tpu", init_scale=8.0, growth_interval=1)
    scaler.scale((parameter * 2).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert parameter.tolist() == [0.0] * 4
    assert scaler.get_scale() == 16
    optimizer.zero_grad()
    scaler.scale((parameter * float("inf")).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert parameter.tolist() == [0.0] * 4
    assert scaler.get_scale() == 8


def test_autocast_of_the_cpu_is_untouched(model, batch):
    host = model.to("cpu")
    with torch.autocast("tpu"):
        assert host(batch[0]).dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert host(batch[0]).dtype == torch.bfloat16
        assert model.to("tpu")(batch[0].to("tpu")).dtype == torch.float32
    model.to("cpu")
