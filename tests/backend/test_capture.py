"""`torch.tpu.capture`: a replayed step computes what the step computes, to the last bit."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.backend.capture_steps import Setup, batch, replays, run


def check_same(story, least_replays: int = 1, **options) -> None:
    """A story (setup, step) -> tensors gives the same bits, weights and random state with a captured step."""
    plain, captured = Setup(**options), Setup(**options)
    torch.tpu.manual_seed_all(7)
    expected = [tensor.cpu() for tensor in story(plain, plain.step)]
    random_state = torch.tpu.get_rng_state()
    torch.tpu.manual_seed_all(7)
    before = replays()
    found = [tensor.cpu() for tensor in story(captured, torch.tpu.capture(captured.step))]
    assert replays() - before >= least_replays
    assert torch.equal(torch.tpu.get_rng_state(), random_state)
    assert [tensor.tolist() for tensor in found] == [tensor.tolist() for tensor in expected]
    assert all(torch.equal(a, b) for a, b in zip(captured.state(), plain.state(), strict=True))


@pytest.fixture(params=[False, True], ids=["small", "deep"])
def is_deep(request):
    return request.param


@pytest.mark.parametrize(("form", "optimizer"), [("fused", "adamw"), ("compile", "sgd")])
def test_losses_weights_and_random_numbers_are_those_of_the_step_itself(form, optimizer, is_deep):
    check_same(
        lambda setup, step: run(setup, step, range(8)),
        least_replays=4,
        form=form,
        optimizer=optimizer,
        is_deep=is_deep,
    )


def test_buffers_that_a_step_writes_go_on():
    check_same(lambda setup, step: run(setup, step, range(7)), least_replays=3, norm=True)


def test_a_rate_that_changes_for_the_first_time_late_is_seen():
    def story(setup, step):
        losses = [step(*batch(number)) for number in range(5)]
        return losses + run(setup, step, range(5, 10))

    check_same(story, least_replays=4)


def test_rates_that_were_equal_and_part_are_seen():
    def story(setup, step):
        setup.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3, device="tpu"))]})
        losses = run(setup, step, range(5))
        setup.optimizer.param_groups[0]["lr"] = 0.5
        return [*losses, step(*batch(5)), *run(setup, step, range(6, 9))]

    check_same(story, least_replays=2)


def test_shapes_take_turns(is_deep):
    def story(setup, step):
        return [loss for number in range(7) for size in (6, 3) for loss in run(setup, step, [number], size)]

    check_same(story, least_replays=6, is_deep=is_deep)


def test_a_parameter_that_lies_otherwise_in_its_storage_is_seen():
    def story(setup, step):
        losses = run(setup, step, range(5))
        weight = setup.model[3].weight
        weight.data = weight.data.t()
        return [*losses, *run(setup, step, range(5, 10))]

    check_same(story, least_replays=4, is_deep=True)


def change_state(setup):
    parameter = setup.model[-1].weight
    state = setup.optimizer.state[parameter]
    setup.optimizer.state[parameter] = {key: torch.ones_like(value) for key, value in state.items()}


def change_group(setup):
    group = setup.optimizer.param_groups[0]
    setup.optimizer.param_groups[0] = {**group, "weight_decay": 0.1}


def change_hook(setup):
    [number] = setup.model[-1]._forward_hooks
    setup.model[-1]._forward_hooks[number] = lambda module, arguments, output: output * 3


def change_parameters(setup):
    module = setup.model[-1]
    module._parameters = {**module._parameters, "bias": nn.Parameter(torch.ones(4, device="tpu"))}


@pytest.mark.parametrize("change", [change_state, change_group, change_hook, change_parameters])
def test_what_stands_in_dictionaries_and_lists_is_seen(change):
    def story(setup, step):
        setup.model[-1].register_forward_hook(lambda module, arguments, output: output * 2)
        losses = run(setup, step, range(5))
        change(setup)
        return [*losses, *run(setup, step, range(5, 8))]

    check_same(story, least_replays=2)


def test_a_model_that_the_step_itself_exchanges_is_seen():
    class Warmup:
        def __init__(self):
            torch.manual_seed(0)
            self.model, self.second = (nn.Linear(8, 4).to("tpu") for _ in range(2))
            self.calls = 0

        def step(self, inputs):
            result = self.model(inputs).sum()
            result.backward()
            self.model.zero_grad()
            self.calls += 1
            if self.calls == 2:
                self.model = self.second
            return result.detach()

    plain, captured = Warmup(), Warmup()
    step = torch.tpu.capture(captured.step)
    for number in range(6):
        inputs, _ = batch(number)
        assert torch.equal(step(inputs).cpu(), plain.step(inputs).cpu())


def test_an_item_of_a_list_is_seen():
    models = [nn.Linear(8, 4).to("tpu") for _ in range(2)]
    others = list(reversed(models))

    @torch.tpu.capture
    def step(inputs):
        return models[0](inputs)

    inputs, _ = batch(0)
    with torch.no_grad():
        for _ in range(4):
            step(inputs)
        models[0] = others[0]
        assert torch.equal(step(inputs).cpu(), others[0](inputs).cpu())


@pytest.mark.parametrize("numbers", [(2, 2.0), (2.0, 2), (0.0, -0.0), (2**53, 2**53 + 1), (1, True)])
def test_numbers_of_another_kind_are_seen(numbers):
    @torch.tpu.capture
    def step(values, number):
        return 1 / (values * number), values * number

    values = torch.tensor([1, 2], device="tpu")
    for number in (*numbers[:1] * 4, *numbers[1:] * 2, *numbers[:1] * 2):
        for found, expected in zip(
            step(values, number), (1 / (values * number), values * number), strict=True
        ):
            assert found.dtype == expected.dtype
            assert torch.equal(found.cpu(), expected.cpu())


def test_what_is_returned_beside_tensors_keeps_its_type():
    answers = iter([1, True, 1.0, 1.0])  # no two in a row are alike until the last

    @torch.tpu.capture
    def step(values):
        return values + 1, next(answers, None)

    values = torch.zeros(2, device="tpu")
    before = replays()
    assert [type(step(values)[1]) for _ in range(6)] == [int, bool, float, float, float, float]
    assert replays() - before == 2


def test_nan_among_the_arguments_is_one_number():
    @torch.tpu.capture
    def step(values, number):
        return values + number

    values = torch.zeros(2, device="tpu")
    before = replays()
    for number in (1.0, 2.0, math.nan, math.nan, 3.0, math.nan):
        assert torch.equal(step(values, number).isnan().cpu(), torch.tensor([math.isnan(number)] * 2))
    assert replays() - before == 4


def test_an_argument_on_the_memory_of_a_parameter_is_seen():
    parameter = torch.ones(3, device="tpu")
    holder = nn.Module()
    holder.register_buffer("kept", parameter)

    @torch.tpu.capture
    def step(inputs):
        holder.kept.mul_(2)
        return inputs + holder.kept

    other = torch.zeros(3, device="tpu")
    for _ in range(4):
        step(other)
    assert step(holder.kept).tolist() == [64.0] * 3
    assert step(holder.kept.data).tolist() == [128.0] * 3


def test_a_buffer_of_another_dtype_on_the_same_memory_is_seen():
    holder = nn.Module()
    holder.register_buffer("kept", torch.ones(3, dtype=torch.float16, device="tpu"))

    @torch.tpu.capture
    def step(inputs):
        return inputs + holder.kept

    inputs = torch.zeros(3, device="tpu")
    for _ in range(4):
        step(inputs)
    holder.kept.data = holder.kept.data.view(torch.bfloat16)
    assert torch.equal(step(inputs).cpu(), holder.kept.cpu().float())


def test_a_setting_that_changes_and_changes_back_is_replayed(is_deep):
    def story(setup, step):
        losses = run(setup, step, range(5))
        setup.model.eval()
        setup.model.train()
        return [*losses, *run(setup, step, range(5, 8))]

    check_same(story, least_replays=3, is_deep=is_deep)


def test_eval_mode_is_seen(is_deep):
    def story(setup, step):
        losses = run(setup, step, range(5))
        setup.model.eval()
        losses += run(setup, step, range(5, 9))
        setup.model[-2].train()
        return losses + run(setup, step, range(9, 13))

    check_same(story, least_replays=4, is_deep=is_deep)


def test_frozen_parameters_are_seen():
    def story(setup, step):
        losses = run(setup, step, range(5))
        setup.model[0].weight.requires_grad_(False)
        return losses + run(setup, step, range(5, 9))

    check_same(story, least_replays=2)


@pytest.mark.parametrize("way", ["another parameter", "data", "copy", "state"])
def test_weights_and_state_that_were_replaced_are_seen(way, is_deep):
    def story(setup, step):
        losses = run(setup, step, range(5))
        weight = setup.model[-1].weight
        kept = weight.data  # what was replaced lives on
        if way == "another parameter":
            setup.model[-1].weight = nn.Parameter(torch.ones(4, 16, device="tpu"))
        elif way == "data":
            weight.data = torch.ones(4, 16, device="tpu")
        elif way == "copy":
            weight.data.copy_(torch.ones(4, 16))
        else:
            setup.optimizer.load_state_dict(setup.optimizer.state_dict())
        return losses + run(setup, step, range(5, 9)) + [kept]

    check_same(story, least_replays=2, is_deep=is_deep)


def test_a_copy_that_somebody_took_stays(is_deep):
    def story(setup, step):
        taken = []
        for number in range(6):
            run(setup, step, [number])
            taken.append(setup.model[0].weight.detach().clone())
        return taken

    check_same(story, is_deep=is_deep)


def leaving_gradients(setup, step):
    """A step that begins with `zero_grad`, captured where `step` is."""

    def leaving(inputs, labels):
        setup.optimizer.zero_grad()
        loss = F.cross_entropy(setup.called(inputs), labels)
        loss.backward()
        setup.optimizer.step()
        return loss

    return leaving if step == setup.step else torch.tpu.capture(leaving)


def test_gradients_that_are_left_behind_are_the_new_ones(is_deep):
    def story(setup, step):
        wrapped = leaving_gradients(setup, step)
        losses = [*run(setup, wrapped, range(6)), setup.model[0].weight.grad.clone()]
        setup.optimizer.zero_grad()
        return losses + run(setup, wrapped, range(6, 8)) + [setup.model[0].weight.grad]

    check_same(story, least_replays=2, is_deep=is_deep)


def test_a_gradient_in_the_place_of_another_is_seen(is_deep):
    def story(setup, step):
        def adding(inputs, labels):
            loss = F.cross_entropy(setup.called(inputs), labels)
            loss.backward()
            return loss

        wrapped = adding if step == setup.step else torch.tpu.capture(adding)
        parameters = list(setup.model.parameters())
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        losses = run(setup, wrapped, range(5))
        kept = [parameter.grad for parameter in parameters]  # what was replaced lives on
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        losses += run(setup, wrapped, range(5, 9))
        return losses + kept + [parameter.grad for parameter in parameters]

    check_same(story, least_replays=2, is_deep=is_deep)


def test_shapes_that_take_turns_may_leave_gradients_behind(is_deep):
    """Each leaves a gradient of its own, in place of the other's."""

    def story(setup, step):
        wrapped = leaving_gradients(setup, step)
        return [run(setup, wrapped, [number], size=6 if number % 3 else 3)[0] for number in range(14)]

    check_same(story, least_replays=3, is_deep=is_deep)


def test_an_error_in_the_step_is_raised_and_nothing_is_lost():
    def story(setup, step):
        losses = run(setup, step, range(5))
        with pytest.raises(RuntimeError, match=r"size|shape"):
            step(torch.ones(2, 9, device="tpu"), torch.zeros(2, dtype=torch.int64, device="tpu"))
        return losses + run(setup, step, range(5, 8))

    check_same(story, least_replays=3)


def test_two_steps_of_two_models_do_not_meet():
    def story(setup, step):
        other = Setup()
        other_step = other.step if step == setup.step else torch.tpu.capture(other.step)
        return [
            loss
            for number in range(6)
            for each in ((setup, step), (other, other_step))
            for loss in run(*each, [number])
        ]

    check_same(story, least_replays=4)


def test_numbers_among_the_arguments_are_inputs():
    @torch.tpu.capture
    def scaled(values, factor, *, power):
        return {"scaled": values * factor, "power": power, "sum": (values**power).sum()}

    values, before = torch.arange(4.0, device="tpu"), replays()
    compiled = []
    for number in range(8):
        found = scaled(values, 0.5 + number, power=2)
        assert found["scaled"].tolist() == [(0.5 + number) * value for value in range(4)]
        assert (found["power"], found["sum"].item()) == (2, 14)
        compiled.append(torch.tpu.compile_stats()["compilations"])
    assert replays() - before >= 5
    assert compiled[2] == compiled[-1]
    assert scaled(values, 2.0, power=3)["sum"].item() == 36


def test_arguments_that_share_memory_are_told_from_those_that_do_not():
    @torch.tpu.capture
    def add(a, b):
        a.add_(1)
        return a + b

    for _ in range(4):
        both = torch.ones(3, device="tpu")
        assert add(both, both).tolist() == [4, 4, 4]
        assert both.tolist() == [2, 2, 2]
    for _ in range(4):
        assert add(torch.ones(3, device="tpu"), torch.ones(3, device="tpu")).tolist() == [3, 3, 3]


def test_results_of_one_replay_are_not_changed_by_the_next():
    double = torch.tpu.capture(lambda values: values * 2)
    results = [double(torch.full((2,), float(number), device="tpu")) for number in range(6)]
    assert [result.tolist() for result in results] == [[2.0 * number] * 2 for number in range(6)]
    assert len({result.data_ptr() for result in results}) == 6


def test_a_copy_that_the_step_keeps_of_what_it_returns_is_the_new_one():
    class Kept:
        last = None

    @torch.tpu.capture
    def step(x):
        y = x * 2
        Kept.last = y.detach().clone()
        return y

    before = replays()
    for number in range(6):
        assert step(torch.tensor([float(number)], device="tpu")).item() == Kept.last.item() == 2 * number
    assert replays() > before


def test_autograd_is_told_that_a_replay_wrote():
    setup = Setup()
    step = torch.tpu.capture(setup.step)
    run(setup, step, range(5))
    weight = setup.model[0].weight
    version, before = weight._version, replays()
    run(setup, step, [5])
    assert replays() == before + 1
    assert weight._version > version


def test_an_index_out_of_range_in_a_replay_names_the_line_of_the_recording():
    table = torch.arange(5.0, device="tpu")

    @torch.tpu.capture
    def look_up(places):
        return table[places]  # this line

    for _ in range(4):
        look_up(torch.tensor([1, 2], device="tpu")).tolist()
    before = replays()
    wrong = look_up(torch.tensor([1, 9], device="tpu"))
    assert replays() == before + 1
    with pytest.raises(IndexError, match=r"(?s)9.*test_capture\.py.*this line"):
        wrong.tolist()


def test_what_follows_an_optimizer_is_part_of_the_step():
    """Two networks that learn from each other, an average of the weights, a sum of losses: one program."""

    def make():
        torch.manual_seed(0)
        maker, judge = nn.Linear(4, 4).to("tpu"), nn.Linear(4, 1).to("tpu")
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (judge, maker)]
        averages = [parameter.detach().clone() for parameter in maker.parameters()]
        total = torch.zeros((), device="tpu")

        def step(noise):
            made = maker(noise)
            for optimizer, loss in zip(
                optimizers, (lambda: judge(made.detach()).square(), lambda: (1 - judge(made)).square())
            ):
                loss().mean().backward()
                optimizer.step()
                for each in optimizers:
                    each.zero_grad()
            with torch.no_grad():
                torch._foreach_lerp_(averages, list(maker.parameters()), 0.1)
                total.add_(judge(made).sum())

        return step, [*maker.parameters(), *judge.parameters(), *averages, total]

    (plain, expected), (step, found) = make(), make()
    captured, before = torch.tpu.capture(step), replays()
    for number in range(8):
        noise = batch(number)[0][:, :4]
        plain(noise)
        captured(noise)
    assert captured.problem is None
    assert replays() - before >= 4
    torch.testing.assert_close(found, expected)


def test_the_same_script_on_the_cpu_is_the_function_itself():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @torch.tpu.capture
    def step(values):
        loss = model(values).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    losses = [step(torch.ones(2)).item() for _ in range(3)]
    assert losses[2] < losses[1] < losses[0]
    assert step.problem == "none of its arguments and parameters is on the device"


def test_batches_that_are_slices_of_the_data_on_the_device_are_replayed():
    def story(setup, step):
        inputs, labels = batch(0, 96)
        return [step(inputs[at : at + 6], labels[at : at + 6]) for at in range(0, 96, 6)]

    check_same(story, least_replays=10)


def test_what_a_function_calls_model_or_optimizer_may_become_another():
    def story(setup, step):
        model, optimizer = setup.called, setup.optimizer

        class Holder:
            loss = staticmethod(F.cross_entropy)

        holder = Holder()
        holder.optimizer = optimizer

        def by_names(inputs, labels):
            loss = holder.loss(model(inputs), labels)
            loss.backward()
            holder.optimizer.step()
            holder.optimizer.zero_grad()
            return loss.detach()

        wrapped = by_names if step == setup.step else torch.tpu.capture(by_names)
        losses = [wrapped(*batch(number)) for number in range(6)]
        holder.optimizer = torch.optim.SGD(setup.model.parameters(), lr=0.5)
        losses += [wrapped(*batch(number)) for number in range(6, 12)]
        model = nn.Linear(8, 4).to("tpu")
        with torch.no_grad():
            model.weight.fill_(0.1)
            model.bias.zero_()
        return [*losses, *(wrapped(*batch(number)) for number in range(12, 18))]

    check_same(story, least_replays=6)


def test_a_method_has_a_step_of_its_own_in_each_object():
    class Counter:
        def __init__(self, by: float) -> None:
            self.total, self.by = torch.zeros(2, device="tpu"), by

        @torch.tpu.capture
        def count(self, times: torch.Tensor) -> torch.Tensor:
            self.total.add_(times * self.by)
            return self.total * 1

    counters, before = [Counter(1.0), Counter(3.0)], replays()
    for _ in range(6):
        for counter in counters:
            counter.count(torch.ones(2, device="tpu"))
    assert [counter.total.tolist() for counter in counters] == [[6, 6], [18, 18]]
    assert replays() >= before + 4


MODES = {
    "gradients": lambda: torch.set_grad_enabled(True),
    "none": lambda: torch.no_grad(),
    "inference": lambda: torch.inference_mode(),
    "bfloat16": lambda: torch.autocast("tpu", torch.bfloat16),
    "float16": lambda: torch.autocast("tpu", torch.float16),
}


def test_modes_take_turns():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).to("tpu")
    forward = torch.tpu.capture(lambda values: model(values))
    before = replays()
    for number in range(4):
        values = batch(number)[0][:, :4]
        for mode in MODES.values():
            with mode():
                found, expected = forward(values), model(values)
            assert found.dtype == expected.dtype
            assert torch.equal(found, expected)
            assert not found.requires_grad
    assert replays() == before + 2 * len(MODES)


def test_a_replay_takes_no_memory_of_what_the_step_leaves_as_it_is():
    """The same operations ran before where the tensor that is read was written, too."""
    a, keep, d = (torch.full((64,), value).to("tpu") for value in (1.0, 3.0, 0.0))
    before = a * 2.0
    a.fill_(2.0)
    torch.tpu.flush()

    def step() -> torch.Tensor:
        doubled = keep * 2.0
        d.fill_(2.0)
        return doubled

    captured = torch.tpu.capture(step)
    for _ in range(5):
        assert captured().tolist() == [6.0] * 64
    assert (keep.tolist(), d.tolist(), before.tolist()) == ([3.0] * 64, [2.0] * 64, [2.0] * 64)


def test_lists_of_views_that_overlap_in_a_later_call():
    """What starts elsewhere is replayed, and views that are apart at first may come to overlap."""

    def step(whole, first, second):
        torch._foreach_mul_([first, second], [2.0, 3.0])
        return whole.sum()

    def results(device, function):
        whole = torch.arange(32.0, device=device)
        starts = [(0, 8), (0, 8), (4, 16), (8, 20), (0, 16), (2, 12), (0, 2), (4, 4)]
        return [function(whole, whole[i : i + 4], whole[j : j + 4]).item() for i, j in starts]

    captured = torch.tpu.capture(step)
    assert results("tpu", captured) == results("cpu", step)
