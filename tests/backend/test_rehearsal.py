"""`torch.tpu.rehearsal`: what is recorded is compiled by threads, and taken back."""

import time
from contextlib import suppress

import pytest
import torch
from torch import nn
from torch.nn import functional as F


class Step:
    """A training step with all that there is to take back: weights, state, averages, random numbers."""

    def __init__(self, **options):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 3))
        self.model.to("tpu")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, **options)
        self.x, self.y = torch.randn(6, 4).to("tpu"), torch.arange(6).to("tpu") % 3

    def __call__(self) -> torch.Tensor:
        loss = F.cross_entropy(self.model(self.x), self.y)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        torch.tpu.flush()
        return loss.detach()

    def state(self) -> list[torch.Tensor]:
        moments = [value for each in self.optimizer.state.values() for value in each.values() if value.is_tpu]
        return [each.detach().cpu() for each in (*self.model.state_dict().values(), *moments)]


def wait_for_threads() -> None:
    while torch.tpu.is_compiling_ahead():
        time.sleep(0.01)


def last_program() -> int:
    return torch.tpu.compilations()[-1].number


def test_what_was_rehearsed_does_not_begin_in_parts():
    layers = nn.Sequential(*(nn.Sequential(*(nn.Linear(9, 9), nn.Tanh()) * 6) for _ in range(5))).to("tpu")
    inputs = torch.randn(3, 9).to("tpu")
    with torch.tpu.eager_mode("fused", parts="first"):
        torch.tpu.flush()
        with torch.tpu.rehearsal():
            layers(inputs).sum().backward()
        wait_for_threads()
        layers.zero_grad()
        prepared = last_program()
        layers(inputs).sum().backward()
        torch.tpu.synchronize()
        assert last_program() == prepared


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True, "capturable": True}])
def test_a_rehearsed_step_is_taken_back_and_has_its_program_when_it_comes(options):
    twin, step = Step(**options), Step(**options)
    expected = []
    torch.manual_seed(1)
    for _ in range(4):
        expected.append(twin().item())
    torch.manual_seed(1)
    losses = [step().item(), step().item()]
    before, generator = step.state(), torch.tpu.get_rng_state()
    step.x = step.x[:5]  # a program that nobody has compiled
    step.y = step.y[:5]
    with torch.tpu.rehearsal():
        rehearsed = step()
    with pytest.raises(RuntimeError, match=r"what is computed in torch.tpu.rehearsal has no value"):
        rehearsed.item()
    assert all(torch.equal(now, was) for now, was in zip(step.state(), before, strict=True))
    assert torch.equal(torch.tpu.get_rng_state(), generator)
    wait_for_threads()
    compiled = last_program()
    step.x, step.y = twin.x, twin.y
    losses += [step().item(), step().item()]
    assert losses == expected
    step.x, step.y = step.x[:5], step.y[:5]
    step()
    torch.tpu.synchronize()
    assert last_program() == compiled


def test_values_from_the_host_are_taken_back_too():
    x, empty = torch.ones(3, device="tpu"), torch.empty(3, device="tpu")
    y = x.view(3, 1)
    with torch.tpu.rehearsal():
        x.copy_(torch.arange(3.0))
        empty.fill_(7)
        y.add_(1)
    assert x.tolist() == [1, 1, 1]
    assert y.flatten().tolist() == [1, 1, 1]
    assert empty.tolist() == torch.zeros(3).tolist()


def test_what_was_there_can_be_read_in_it_and_nothing_else():
    x = torch.ones(3, device="tpu")
    with torch.tpu.rehearsal():
        assert x.tolist() == [1, 1, 1]
    with torch.tpu.rehearsal():
        y = x.mul_(2)
        with pytest.raises(RuntimeError, match=r"has no value"):
            y.tolist()
        with pytest.raises(RuntimeError, match=r"inside another one"), torch.tpu.rehearsal():
            pass
    assert (x + 1).tolist() == [2, 2, 2]


def test_an_error_in_it_compiles_nothing():
    x = torch.ones(3, device="tpu")
    torch.tpu.synchronize()
    wait_for_threads()
    compiled = last_program()
    with suppress(ZeroDivisionError), torch.tpu.rehearsal():
        x.mul_(2).atan_()
        raise ZeroDivisionError
    wait_for_threads()
    assert x.tolist() == [1, 1, 1]
    assert last_program() == compiled


def test_a_captured_step_is_rehearsed_by_its_python():
    x = torch.ones(3, device="tpu")

    def double() -> torch.Tensor:
        return x * 2

    captured = torch.tpu.capture(double)
    for _ in range(4):
        captured()
    assert captured.problem is None
    replays = torch.tpu.compile_stats()["replays"]
    with torch.tpu.rehearsal():
        captured()
    assert captured.problem is not None
    assert torch.tpu.compile_stats()["replays"] == replays
    for _ in range(3):
        assert captured().tolist() == [2, 2, 2]
    assert captured.problem is None


@pytest.mark.parametrize("mode", ["strict", "debug"])
def test_modes_with_other_programs_refuse(mode):
    with (
        torch.tpu.eager_mode(mode),
        pytest.raises(RuntimeError, match=f"in mode '{mode}': it prepares fused mode's programs"),
        torch.tpu.rehearsal(),
    ):
        pass


def test_a_generator_of_the_users_own_goes_on_where_it_stood():
    ours, theirs = (torch.Generator("tpu").manual_seed(5) for _ in range(2))
    draws = [torch.rand(3, generator=theirs, device="tpu").tolist() for _ in range(2)]
    assert torch.rand(3, generator=ours, device="tpu").tolist() == draws[0]
    with torch.tpu.rehearsal():
        torch.rand(4, generator=ours, device="tpu").add_(1)
        torch.rand(4, generator=ours, device="tpu").add_(1)
    assert torch.rand(3, generator=ours, device="tpu").tolist() == draws[1]


def test_what_was_there_is_not_resized():
    x = torch.arange(4.0, device="tpu")
    with torch.tpu.rehearsal():
        (x + 1).resize_(8)
        with pytest.raises(
            RuntimeError, match=r"a storage from before torch.tpu.rehearsal cannot be resized"
        ):
            x.resize_(8)
    assert x.tolist() == [0, 1, 2, 3]


def test_a_rehearsed_captured_step_is_one_program_and_compiles_nothing_when_it_comes():
    torch.manual_seed(0)
    model = nn.Linear(4, 3).to("tpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    calls = torch.zeros((), device="tpu")

    @torch.tpu.capture
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        calls.add_(1)  # behind the optimizer's step
        return loss.detach()

    for _ in range(4):
        step(torch.randn(5, 4).to("tpu"))
    other = torch.randn(6, 4).to("tpu")
    torch.tpu.synchronize()
    with torch.tpu.rehearsal():
        step(other)
    wait_for_threads()
    compiled = last_program()
    for _ in range(3):
        step(other)
    torch.tpu.synchronize()
    assert last_program() == compiled
    assert calls.item() == 7
