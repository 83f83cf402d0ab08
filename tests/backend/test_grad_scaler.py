"""`torch.amp.GradScaler("tpu")`: the CPU's scales, skipped steps, and no read of the host beyond its own."""

import pytest
import torch
from torch import nn


def _train(device, make_optimizer, num_steps=6, overflow_at=(3,), clip=True):
    torch.manual_seed(0)
    model = nn.Linear(3, 2).to(device)
    optimizer = make_optimizer(model.parameters())
    scaler = torch.amp.GradScaler(device, init_scale=8.0, growth_interval=2)
    scales = []
    for number in range(num_steps):
        optimizer.zero_grad()
        loss = model(torch.ones(2, 3).to(device)).square().mean()
        if number in overflow_at:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        if clip:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales, model.weight.detach().cpu(), scaler.state_dict()


OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
    "fused adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=True),
}


@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_scales_and_weights_are_the_cpus(name, clip):
    torch.tpu.reset_fallback_stats()
    scales, weight, state = _train("tpu", OPTIMIZERS[name], clip=clip)
    expected_scales, expected_weight, expected_state = _train("cpu", OPTIMIZERS[name], clip=clip)
    assert scales == expected_scales == [8, 16, 16, 8, 8, 16]
    assert state == expected_state
    torch.testing.assert_close(weight, expected_weight)
    assert torch.tpu.fallback_stats() == {}


def test_float16_gradients_that_overflow_skip_the_step():
    model = nn.Linear(4, 4).to("tpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("tpu", init_scale=2.0**20)
    before = model.weight.detach().clone()
    with torch.autocast("tpu", dtype=torch.float16):
        loss = model(torch.ones(2, 4).to("tpu")).sum()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(model.weight, before)
    assert scaler.get_scale() == 2.0**19


@pytest.mark.parametrize(("name", "reads"), [("sgd", 1), ("fused adamw", 0)])
def test_a_step_reads_what_the_scaler_reads_and_no_more(name, reads):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)).to("tpu")
    optimizer = OPTIMIZERS[name](model.parameters())
    scaler = torch.amp.GradScaler("tpu", init_scale=8.0)

    def step():
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(2, 3, device="tpu")).sum()).backward()
        scaler.step(optimizer)
        scaler.update()

    for _ in range(3):
        step()
    before = torch.tpu.compile_stats()
    for _ in range(4):
        step()
    after = torch.tpu.compile_stats()
    assert after["host_reads"] - before["host_reads"] == 4 * reads  # found_inf, which decides on the step
    assert after["compilations"] == before["compilations"]
