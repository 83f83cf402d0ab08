"""Schedule, parameter groups and optimizer state."""

import copy
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tputrain import OptimConfig, ScheduleConfig
from tputrain.optim.groups import parameter_groups
from tputrain.optim.optimizer import create_state


def test_the_cosine_warms_up_and_comes_down_to_its_fraction():
    schedule = ScheduleConfig(warmup_steps=4, final_fraction=0.1)
    factors = [schedule.factor(step, 11) for step in range(11)]
    assert factors[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert factors[7] == pytest.approx(0.55)
    assert factors[10] == pytest.approx(0.1)


def test_linear_and_constant():
    linear = ScheduleConfig(name="linear", final_fraction=0.0)
    assert [linear.factor(step, 5) for step in range(5)] == [1.0, 0.75, 0.5, 0.25, 0.0]
    constant = ScheduleConfig(name="constant", warmup_steps=2)
    assert [constant.factor(step, 4) for step in range(4)] == [0.5, 1.0, 1.0, 1.0]


def test_a_schedule_of_its_own_length_does_not_change_with_the_run():
    schedule = ScheduleConfig(steps=10)
    assert [schedule.factor(step, 5) for step in range(20)] == [
        schedule.factor(step, 500) for step in range(20)
    ]
    assert schedule.factor(19, 20) == pytest.approx(schedule.final_fraction)


def test_warm_up_stable_decay():
    wsd = ScheduleConfig(name="wsd", warmup_steps=2, final_fraction=0.0, decay_fraction=0.4)
    factors = [wsd.factor(step, 10) for step in range(10)]
    assert factors == [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
    none = ScheduleConfig(name="wsd", decay_fraction=0.0)
    assert [none.factor(step, 4) for step in range(4)] == [1.0, 1.0, 1.0, 1.0]


@given(
    name=st.sampled_from(["cosine", "linear", "constant", "wsd"]),
    warmup=st.integers(0, 50),
    total=st.integers(1, 100),
    final=st.floats(0, 1),
)
def test_a_factor_is_from_zero_to_one_and_never_rises_after_the_warm_up(name, warmup, total, final):
    decay = {} if name == "constant" else {"final_fraction": final}
    schedule = ScheduleConfig(name=name, warmup_steps=warmup, **decay)
    factors = [schedule.factor(step, total) for step in range(total)]
    assert all(0.0 <= factor <= 1.0 + 1e-12 for factor in factors)
    decay = factors[warmup:]
    assert all(later <= earlier + 1e-12 for earlier, later in pairwise(decay))


def test_norms_and_biases_do_not_decay_and_frozen_parameters_are_left_out():
    model = nn.Sequential(
        nn.Embedding(3, 4), nn.Linear(4, 4), nn.LayerNorm((2, 4)), nn.Linear(4, 2, bias=False)
    )
    model[3].weight.requires_grad = False
    decayed, kept = parameter_groups(model, 0.1)
    assert [p.shape for p in decayed["params"]] == [(3, 4), (4, 4)]
    assert [p.shape for p in kept["params"]] == [(4,), (2, 4), (2, 4)]
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.1, 0.0)


@pytest.mark.parametrize(
    "make",
    [
        lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
        lambda parameters: torch.optim.AdamW(parameters, lr=0.1, amsgrad=True, fused=True),
        lambda parameters: torch.optim.Adam(parameters, lr=0.1, foreach=True),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    ],
)
def test_state_made_up_front_is_the_state_that_the_first_step_would_make(make):
    def train(up_front: bool) -> tuple[list[torch.Tensor], dict]:
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer = make(model.parameters())
        if up_front:
            create_state(optimizer)
            before = copy.deepcopy(optimizer.state_dict()["state"])
        for _ in range(3):
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        after = optimizer.state_dict()["state"]
        if up_front:
            assert {key: entry.keys() for key, entry in before.items()} == {
                key: entry.keys()
                for key, entry in after.items()
                if any(v is not None for v in entry.values())
            }
        return list(model.parameters()), after

    (ours, _), (expected, _) = train(True), train(False)
    assert all(torch.equal(a, b) for a, b in zip(ours, expected))


def test_an_optimizer_takes_every_setting():
    adamw = OptimConfig(learning_rate=0.5, beta1=0.8, beta2=0.7, eps=1e-3).build(nn.Linear(2, 2))
    assert isinstance(adamw, torch.optim.AdamW)
    assert (adamw.defaults["lr"], adamw.defaults["betas"], adamw.defaults["eps"]) == (0.5, (0.8, 0.7), 1e-3)
    sgd = OptimConfig(name="sgd", momentum=0.4).build(nn.Linear(2, 2))
    assert isinstance(sgd, torch.optim.SGD)
    assert sgd.defaults["momentum"] == 0.4


@pytest.mark.parametrize("device", ["cpu", "tpu"])
def test_adamw_of_16_bit_weights_rounds_once_a_step(device):
    torch.manual_seed(0)
    values, gradients = torch.randn(64, 64).bfloat16(), torch.randn(3, 64, 64).bfloat16()
    found = {}
    for dtype in (torch.bfloat16, torch.float64):
        model = nn.Linear(64, 64, bias=False, dtype=dtype).to(device)
        model.weight.data.copy_(values)
        optimizer = OptimConfig(learning_rate=0.01).build(model)
        assert optimizer.defaults["fused"] == (True if dtype == torch.bfloat16 else None)
        for gradient in gradients:
            model.weight.grad = gradient.to(device, dtype)
            optimizer.step()
        found[dtype] = model.weight.detach().cpu().double()
    error = (found[torch.bfloat16] - found[torch.float64]).abs()
    # In each of three steps a weight is rounded, and its moments are.
    assert (error <= 3 * 2**-8 * found[torch.float64].abs() + 3e-4).all()
