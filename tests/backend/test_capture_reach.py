"""`torch.tpu.capture`: what a captured function uses is looked at, wherever it has it from."""

import itertools
import math
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.backend.test_capture import check_same, replays, run


def test_a_captured_step_inside_another_is_part_of_it():
    total = torch.zeros(2, device="tpu")
    inner = torch.tpu.capture(lambda values: total.add_(values.sin()) * 1)
    outer = torch.tpu.capture(lambda values: inner(values * 2) + 1)
    before = replays()
    for _ in range(5):  # one after the other, then one in the other
        inner(torch.ones(2, device="tpu"))
    assert replays() > before
    for _ in range(5):
        found = outer(torch.ones(2, device="tpu"))
    expected = 5 * math.sin(1) + 5 * math.sin(2)
    torch.testing.assert_close(total.cpu(), torch.full((2,), expected))
    torch.testing.assert_close(found.cpu(), torch.full((2,), expected + 1))
    assert outer.problem is None
    assert inner.problem == "it was called inside another captured step, which does its work too"


@pytest.mark.parametrize("where", ["in a list", "of an object", "by its modules"])
def test_what_is_inside_a_captured_step_inside_another_is_looked_at(where):
    dropout = nn.Dropout(0.5)
    if where == "by its modules":
        hidden = {"there": {"far": [dropout]}}
        inner = torch.tpu.capture(lambda values: hidden["there"]["far"][0](values), modules=[dropout])
    else:
        inner = torch.tpu.capture(lambda values: dropout(values))
    steps, holder = [inner], SimpleNamespace(inner=inner)
    if where == "in a list":
        outer = torch.tpu.capture(lambda values: steps[0](values) * 2)
    else:
        outer = torch.tpu.capture(lambda values: holder.inner(values) * 2)
    ones = torch.ones(64, device="tpu")
    for _ in range(4):
        assert 0 in outer(ones)
    assert outer.problem is None
    dropout.eval()
    assert outer(ones).eq(2).all()


class Holder:
    def __init__(self, held):
        self.held = held

    def call(self, values):
        held = self.held
        while not callable(held):
            held = held["key"] if isinstance(held, dict) else getattr(held, "held", None) or held[0]
        return held(values)


@pytest.mark.parametrize(
    "hold",
    [
        lambda model: [model],
        lambda model: {"key": {"key": model}},
        lambda model: Holder(Holder([model])),
        lambda model: lambda values: model(values),
    ],
    ids=["list", "dictionaries", "objects", "function"],
)
def test_a_model_is_looked_at_wherever_it_is_held(hold):
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).to("tpu")
    step = torch.tpu.capture(Holder(hold(model)).call)
    ones = torch.ones(16, 4, device="tpu")
    for _ in range(4):
        assert 0 in step(ones)
    assert step.problem is None
    model.eval()
    assert torch.equal(step(ones), model(ones))


def test_a_model_may_be_an_argument():
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).to("tpu")
    step = torch.tpu.capture(lambda model, values: model(values))
    ones = torch.ones(16, 4, device="tpu")
    for _ in range(4):
        assert 0 in step(model, ones)
    assert step.problem is None
    model[1] = nn.ReLU()
    assert torch.equal(step(model, ones), model(ones))


def test_a_model_on_the_cpu_may_be_an_argument():
    model = nn.Linear(4, 4)
    step = torch.tpu.capture(lambda model, values: model(values))
    ones = torch.ones(2, 4)
    assert torch.equal(step(model, ones), model(ones))


def test_an_optimizers_hook_that_is_added_is_seen():
    def story(setup, step):
        losses = run(setup, step, range(5))
        parameter = setup.model[-1].weight
        handle = setup.optimizer.register_step_post_hook(lambda *_: parameter.data.clamp_(-0.1, 0.1))
        losses += run(setup, step, range(5, 9))
        handle.remove()
        return losses + run(setup, step, range(9, 13))

    check_same(story, least_replays=5)


def test_what_a_module_counts_on_the_host_goes_on():
    model = nn.Linear(4, 4).to("tpu")
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    average.n_averaged = average.n_averaged.cpu()

    @torch.tpu.capture
    def step(values):
        with torch.no_grad():
            model.weight.add_(model(values).mean())
        average.update_parameters(model)
        return model(values)

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for _ in range(6):
            step(torch.ones(2, 4, device="tpu"))
    assert average.n_averaged == 6
    assert "it changes AveragedModel.n_averaged, which is on the host: move it" in str(warned[0].message)


def test_a_tensor_on_the_host_that_a_module_makes_anew_is_refused():
    class Counts(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4, device="tpu")
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, values):
            self.calls = self.calls + 1
            return super().forward(values)

    model = Counts()
    step = torch.tpu.capture(lambda values: model(values))
    for _ in range(6):
        step(torch.ones(2, 4, device="tpu"))
    assert model.calls == 6
    assert "it changes Counts.calls, which is on the host" in step.problem


@pytest.mark.parametrize("where", ["closure", "buffer", "rate of SGD", "rate of AdamW", "rate computed with"])
def test_a_number_that_is_a_tensor_on_the_host_is_taken_as_it_is(where):
    """`lr.fill_()` of a schedule, say; what is computed of it on the host is seen, and ends the replays."""

    def losses(captured: bool) -> list[float]:
        torch.manual_seed(0)
        model = nn.Linear(4, 1).to("tpu")
        rate, factor = torch.tensor(0.1), torch.tensor(1.0)
        if where == "rate of AdamW":
            optimizer = torch.optim.AdamW(model.parameters(), rate, fused=True)
        elif where == "rate computed with":
            optimizer = torch.optim.AdamW(model.parameters(), rate, foreach=False, capturable=True)
        else:
            optimizer = torch.optim.SGD(model.parameters(), rate if where == "rate of SGD" else 0.1)
        if where == "buffer":
            model.register_buffer("factor", factor)

        def step(batch):
            loss = (model(batch) * (factor if where == "closure" else getattr(model, "factor", 1.0))).square()
            loss.mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.mean()

        call = torch.tpu.capture(step) if captured else step
        found = []
        for number in range(12):
            if number >= 6:
                factor.fill_(1 + number / 10)
                rate.fill_(0.1 / (1 + number))
            found.append(call(torch.ones(8, 4, device="tpu") * number).item())
        if captured:
            assert (call.problem is None) == (where != "rate computed with"), call.problem
        return found

    with warnings.catch_warnings(action="ignore"):
        before = replays()
        assert losses(captured=True) == losses(captured=False)
    assert replays() > before


def test_numbers_of_the_host_that_no_double_holds():
    count, unknown = torch.tensor(2**53), torch.tensor(math.nan)

    @torch.tpu.capture
    def step(values):
        return values + count, values * unknown

    ones = torch.ones((), device="tpu", dtype=torch.int64)
    for number in range(8):
        count.fill_(2**53 + number)
        total, nothing = step(ones)
        assert total.item() == 2**53 + number + 1
        assert nothing.isnan()
        if number == 3:
            assert "itself" not in step.problem


def test_another_tensor_on_the_host_in_place_of_one_is_seen():
    factor = torch.tensor(1.0)

    @torch.tpu.capture
    def step(batch):
        return batch * factor

    found = []
    for number in range(6):
        if number == 4:
            factor = torch.tensor(3.0)
        found.append(step(torch.ones((), device="tpu")).item())
    assert found == [1.0, 1.0, 1.0, 1.0, 3.0, 3.0]


def test_a_step_that_comes_in_every_eighth_call_is_warned_of():
    model = nn.Linear(4, 4).to("tpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    calls = itertools.count(1)

    @torch.tpu.capture
    def step(values):
        loss = model(values).square().mean()
        loss.backward()
        if next(calls) % 8 == 0:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        return loss

    with pytest.warns(UserWarning, match=r"in which no optimizer stepped.*put all of them into one function"):
        run_calls(step, 6)

    @torch.tpu.capture
    def told(values, update: bool):
        loss = model(values).square().mean()
        loss.backward()
        if update:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        return loss

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_calls(lambda values: told(values, False), 6)


def run_calls(step, times):
    for _ in range(times):
        step(torch.ones(2, 4, device="tpu"))


def test_a_loss_of_a_captured_function_inside_another_has_its_gradient():
    weight = torch.ones(3, device="tpu", requires_grad=True)
    loss_of = torch.tpu.capture(lambda values: (weight * values).sum())

    @torch.tpu.capture
    def step(values):
        loss = loss_of(values)
        loss.backward()
        with torch.no_grad():
            weight.sub_(weight.grad)
        weight.grad = None
        return loss

    for mode in ("fused", "strict"):
        with torch.tpu.eager_mode(mode):
            losses = [step(torch.ones(3, device="tpu")).item() for _ in range(4)]
        assert losses == [losses[0] - 3 * number for number in range(4)]
        assert not step(torch.ones(3, device="tpu")).requires_grad


@pytest.fixture
def mesh():
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield DeviceMesh("tpu", [0])
    distributed.destroy_process_group()


@pytest.mark.parametrize(
    "place", ["a parameter", "a parameter it does not lead to", "an argument", "a result"]
)
def test_a_dtensor_is_no_part_of_a_captured_step_and_is_told(place, mesh):
    def distribute(tensor: torch.Tensor) -> DTensor:
        return DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)

    model = nn.Linear(4, 4).to("tpu")
    if "parameter" in place:
        for name, parameter in list(model.named_parameters()):
            model.register_parameter(name, nn.Parameter(distribute(parameter.detach())))
    trained = [model, torch.optim.SGD(model.parameters(), lr=0.1)]
    if place == "a parameter it does not lead to":
        trained = [[trained]]

    def train(x: torch.Tensor) -> torch.Tensor:
        model, optimizer = trained if len(trained) == 2 else trained[0][0]
        x = distribute(x) if "parameter" in place else getattr(x, "_local_tensor", x)
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        loss = loss.to_local() if isinstance(loss, DTensor) else loss
        return distribute(loss.detach()) if place == "a result" else loss

    step = torch.tpu.capture(train)
    x = torch.ones(2, 4, device="tpu")

    def losses_of(calls: int) -> list[float]:
        found = [step(distribute(x) if place == "an argument" else x) for _ in range(calls)]
        return [getattr(loss, "_local_tensor", loss).item() for loss in found]

    with pytest.warns(UserWarning, match="DTensor"):
        losses = losses_of(5)
    assert losses == sorted(losses, reverse=True)
    assert len(set(losses)) == 5
    assert "DTensor" in step.problem
