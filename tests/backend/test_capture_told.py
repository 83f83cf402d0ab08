"""`torch.tpu.capture`: what it does not replay, and what it says about that."""

import logging
import re
import warnings

import pytest
import torch
from torch import nn

from tests.backend.capture_steps import Setup, batch, replays, run


@pytest.mark.parametrize("mode", ["strict", "debug"])
def test_in_other_modes_the_function_is_run(mode):
    double = torch.tpu.capture(lambda values: values * 2)
    values = torch.ones(2, device="tpu")
    for _ in range(4):
        double(values)
    before = replays()
    with torch.tpu.eager_mode(mode):
        assert double(values).tolist() == [2, 2]
    assert replays() == before
    assert double.problem == "the eager mode is not fused"
    assert double(values).tolist() == [2, 2]
    assert replays() == before + 1


def _reads(setup):
    def step(inputs, labels):
        loss = setup.step(inputs, labels)
        return loss if loss.item() > 0 else -loss

    return step


def _waits(setup):
    def step(inputs, labels):
        loss = setup.step(inputs, labels)
        torch.tpu.synchronize()
        return loss + 1

    return step


def _takes_turns(setup):
    calls = []

    def step(inputs, labels):
        calls.append(0)
        wave = torch.sin if len(calls) % 2 else torch.cos
        return setup.step(wave(inputs), labels)

    return step


def _sets_the_rate(setup):
    def step(inputs, labels):
        setup.set_rate(setup.optimizer.param_groups[0]["lr"] / 2)
        return setup.step(inputs, labels)

    return step


def _counts(setup):
    calls = []

    def step(inputs, labels):
        calls.append(0)
        return setup.step(inputs, labels) * len(calls)

    return step


def _makes_a_tensor(setup):
    def step(inputs, labels):
        return setup.step(inputs + torch.tensor([2.0], device="tpu"), labels)

    return step


def _keeps_what_it_returns(setup):
    def step(inputs, labels):
        setup.last = setup.step(inputs, labels)
        return setup.last

    return step


def _returns_a_view_of_what_it_keeps(setup):
    def step(inputs, labels):
        setup.losses = [setup.step(inputs, labels)]
        return setup.losses[0].view(1)

    return step


def _has_state_on_the_host(setup):
    setup.optimizer = torch.optim.AdamW([setup.model[-1].bias])
    return setup.step


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (
            _reads,
            r"it reads a tensor to the host.*test_capture_told.py:\d+: return loss if loss.item"
            r".*: return what is",
        ),
        (_waits, r"it is more than one program.*test_capture_told.py:\d+: torch.tpu.synchronize"),
        (
            _takes_turns,
            r"it computes something else than in the call before: aten::(sin|cos), first met at "
            r".*test_capture_told.py:.*: what changes must be an argument; calls .* belong in one function",
        ),
        (_sets_the_rate, r"it changes SGD.param_groups\[0\]\['lr'\] itself"),
        (_counts, r"a number that aten::mul.*takes changes from call to call"),
        (_makes_a_tensor, r"it reads a tensor that it made on the host itself.*aten::add"),
        (_keeps_what_it_returns, r"it returns a tensor that it also keeps .*: keep a copy, .*clone\(\)"),
        (_returns_a_view_of_what_it_keeps, r"it returns a tensor that it also keeps"),
        (_has_state_on_the_host, r"'step' of AdamW is kept on the host"),
    ],
)
def test_what_cannot_be_replayed_is_run_each_time_and_says_why(make, why):
    plain, captured = Setup(), Setup()
    torch.tpu.manual_seed_all(7)
    step = make(plain)
    expected = [step(*batch(number)).item() for number in range(6)]
    torch.tpu.manual_seed_all(7)
    step, before = torch.tpu.capture(make(captured)), replays()
    with pytest.warns(UserWarning, match=rf"torch.tpu.capture: .* is run by Python each time: {why}"):
        assert [step(*batch(number)).item() for number in range(6)] == expected
    assert replays() == before


def test_a_tensor_on_the_cpu_is_refused():
    model = nn.Linear(2, 2).to("tpu")
    for function in (lambda values: model(values) * 2, lambda values: values * 2):
        with pytest.raises(TypeError, match=r"argument 0 is a tensor on cpu.*move it first"):
            torch.tpu.capture(function)(torch.ones(2))


def test_what_is_recorded_again_says_why(caplog):
    setup = Setup()
    step = torch.tpu.capture(setup.step)
    run(setup, step, range(5))
    assert step.problem is None
    with caplog.at_level(logging.INFO, "tpu_backend.compile"), warnings.catch_warnings():
        warnings.simplefilter("error")
        setup.model[3].eval()
        run(setup, step, [5])
    assert any("is recorded again: Sequential.3.training changed" in line for line in caplog.messages)


@pytest.mark.parametrize(
    "arguments", [(3,), (nn.Linear(2, 2), [], [nn.Linear(2, 2)]), (lambda: None, nn.Linear(2, 2))]
)
def test_what_cannot_be_captured_is_refused(arguments):
    function, *rest = arguments
    with pytest.raises(TypeError, match=r"torch\.tpu\.capture: .*expected a "):
        torch.tpu.capture(function, **dict(zip(("modules", "optimizers"), rest, strict=False)))


def test_a_constant_that_is_new_in_each_call_is_warned_of():
    add = torch.tpu.capture(lambda values, name: values + len(name))
    values = torch.ones(2, device="tpu")
    for number in range(23):
        add(values, "a" * number)
    with pytest.warns(UserWarning, match="run by Python 24 times in a row"):
        add(values, "a" * 23)


def test_more_shapes_in_turns_than_are_kept_are_told():
    double = torch.tpu.capture(lambda values: values * 2)
    for number in range(23):
        double(torch.ones(1 + number % 9, device="tpu"))
    with pytest.warns(UserWarning, match=r"none of the last 8 shapes.*of at most 8 shapes"):
        double(torch.ones(6, device="tpu"))


def test_shapes_in_turns_are_not_warned_of():
    double = torch.tpu.capture(lambda values: values * 2)
    before = replays()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            for size in range(1, 9):
                double(torch.ones(size, device="tpu"))
    assert replays() == before + 8


def test_a_step_of_too_many_operations_is_told():
    def step(values):
        for _ in range(16_500):
            values + 1  # which nobody wants: it is cut, and not compiled
        return values * 2

    captured = torch.tpu.capture(step)
    captured(torch.ones(1, device="tpu"))
    assert captured.problem.startswith("it is more than 16384 operations: capture a part of it")


def test_a_module_of_torchscript_is_run_each_time_and_says_why():
    scripted = torch.jit.script(nn.Linear(2, 2)).to("tpu")
    step = torch.tpu.capture(lambda values: scripted(values) * 2, modules=[scripted])
    for _ in range(3):
        step(torch.ones(1, 2, device="tpu"))
    assert "is a module of TorchScript" in step.problem


def test_an_argument_that_comes_to_require_a_gradient_is_told_and_a_detached_one_is_replayed():
    model = nn.Linear(3, 3).to("tpu")

    def gradient(values: torch.Tensor) -> torch.Tensor:
        values.requires_grad_()
        model(values).square().sum().backward()
        model.zero_grad()
        return values.grad

    step = torch.tpu.capture(gradient)
    for _ in range(3):
        step(torch.ones(1, 3, device="tpu"))
    assert "an argument (float32[1, 3]) that requires a gradient, and did not before" in step.problem
    step = torch.tpu.capture(lambda values: gradient(values.detach()))
    for _ in range(5):
        result = step(torch.ones(1, 3, device="tpu"))
    assert step.problem is None
    torch.testing.assert_close(result, gradient(torch.ones(1, 3, device="tpu")))


@pytest.mark.parametrize("zeros", [lambda values: None, torch.zeros_like], ids=["new", "added to"])
def test_a_gradient_that_is_left_in_an_argument_is_told_and_is_that_arguments_own(zeros):
    model = nn.Linear(3, 3).to("tpu").requires_grad_(False)

    @torch.tpu.capture
    def step(values):
        loss = model(values).square().sum()
        loss.backward()
        return loss

    def arguments():
        for number in range(5):
            values = torch.full((1, 3), number + 1.0, device="tpu").requires_grad_()
            values.grad = zeros(values)
            yield values

    given = list(arguments())
    with pytest.warns(
        UserWarning, match="it reads or leaves a gradient in argument 0, where .*: return it, as torch"
    ):
        [step(values) for values in given]
    for values in given:
        loss = model(values).square().sum()
        assert torch.equal(values.grad, torch.autograd.grad(loss, values)[0])


def test_gradients_that_are_taken_away_between_calls_are_told_and_warned_of_soon():
    model = nn.Linear(3, 2).to("tpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @torch.tpu.capture
    def step(values):
        model(values).square().sum().backward()
        optimizer.step()

    def run(times: int) -> None:
        for _ in range(times):
            optimizer.zero_grad()
            step(torch.ones(4, 3, device="tpu"))

    run(3)
    reason = r"the gradient of Linear\.weight was taken away: call zero_grad\(\) inside the step"
    with pytest.warns(UserWarning, match=f"is run by Python each time: {reason}"):
        run(4)
    assert re.match(f"it was recorded again, since {reason}", step.problem)
