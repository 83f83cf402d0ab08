"""`torch.tpu.spmd`: what picks a region's programs, and which of its tensors have values afterwards."""

import json
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.backend.fresh_process import run_python
from tpu_backend.runtime import compiler


class Step:
    """A training step of a small model, as a region."""

    def __init__(self, layers: int = 1, width: int = 8):
        torch.manual_seed(0)
        deep = [each for _ in range(layers) for each in (nn.Linear(width, width), nn.Tanh())]
        ends = nn.Linear(4, width), nn.Linear(width, 3)
        self.model = nn.Sequential(ends[0], nn.BatchNorm1d(width), *deep, ends[1]).to("tpu")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.x, self.y = torch.randn(6, 4).to("tpu"), torch.arange(6).to("tpu") % 3
        self.made: list[torch.Tensor] = []
        self.run = torch.tpu.spmd(self.step)

    def step(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        logits = self.model(self.x)
        self.made.append(logits)
        loss = F.cross_entropy(logits, self.y)
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def test_a_region_trains_as_its_function_does():
    plain, region = Step(), Step()
    for _ in range(4):
        expected, loss = plain.step(), region.run()
        torch.testing.assert_close(loss.cpu(), expected.cpu())
    for one, other in zip(plain.model.state_dict().values(), region.model.state_dict().values(), strict=True):
        torch.testing.assert_close(other.cpu(), one.cpu())
    for one, other in zip(plain.model.parameters(), region.model.parameters(), strict=True):
        torch.testing.assert_close(other.grad.cpu(), one.grad.cpu())
    assert len(region.run.digests) == 1


def test_what_is_not_declared_has_no_value_and_its_line_is_named():
    step = Step(width=1013)  # a line is where a signature was met first: no other test has these
    step.run()
    at_its_line = r"none of its results: return it, .*keep.* at .*test_regions.py:\d+: logits"
    with pytest.raises(RuntimeError, match=at_its_line):
        step.made[-1].cpu()


def test_what_is_kept_has_a_value():
    x = torch.arange(6.0, device="tpu")
    made = []

    @torch.tpu.spmd
    def double(x: torch.Tensor) -> None:
        y = x * 2
        double.keep(y)
        made.append(y)

    double(x)
    assert made[0].tolist() == [0, 2, 4, 6, 8, 10]
    with pytest.raises(RuntimeError, match=r"keep\(\) of the region .*call it inside"):
        double.keep(x)


def test_holding_results_or_operands_compiles_nothing():
    step, held = Step(), []
    for number in range(6):
        held += [step.run(), *(each.detach().clone() for each in step.model.parameters())]
        held += [each.grad for each in step.model.parameters()]
        if number == 1:
            compilations, digests = torch.tpu.compile_stats()["compilations"], step.run.digests
    assert torch.tpu.compile_stats()["compilations"] == compilations
    assert step.run.digests == digests


def test_buffers_that_share_a_value_are_inputs_of_their_own():
    def average(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a.mul_(0.5)
        return a + b

    digests = set()
    for shares in (False, True):
        region = torch.tpu.spmd(average)
        a = torch.arange(5.0).to("tpu")
        b = a.clone() if shares else torch.arange(5.0).to("tpu")
        assert region(a, b).tolist() == [0, 1.5, 3, 4.5, 6]
        assert b.tolist() == [0, 1, 2, 3, 4]
        digests.add(region.digests)
    assert len(digests) == 1


@pytest.mark.parametrize("reads_before", [False, True])
def test_a_copy_made_in_a_region_is_no_input_of_its_own(reads_before: bool, monkeypatch: pytest.MonkeyPatch):
    """FSDP2 copies weights that one rank has whole; the optimizer then writes them in place."""
    num_inputs = []
    lower = compiler.lower_segment

    def noting(description, target):
        num_inputs.append(len(description["inputs"]))
        return lower(description, target)

    monkeypatch.setattr(compiler, "lower_segment", noting)

    def step(weight: torch.Tensor, average: torch.Tensor) -> torch.Tensor:
        before = weight.sum() if reads_before else 0
        gathered = torch.empty_like(weight)
        gathered.copy_(weight)
        loss = (gathered * 3).sum() + before
        average.lerp_(weight, 0.5)
        weight.sub_(gathered * 0.125)
        return loss

    digests = set()
    for shares in (False, True):
        region = torch.tpu.spmd(step)
        weight = torch.arange(7.0).to("tpu")
        average = weight.clone() if shares else torch.arange(7.0).to("tpu")
        assert region(weight, average).item() == 63 + 21 * reads_before
        assert weight.tolist() == [0.875 * each for each in range(7)]
        assert average.tolist() == [float(each) for each in range(7)]
        digests.add(region.digests)
    assert len(digests) == 1
    assert num_inputs == [2]


def test_a_region_may_begin_with_a_copy_of_what_the_host_gave():
    # In a process of its own: nothing was recorded there before.
    done = run_python(
        """
        import torch, tpu_backend

        weight = torch.arange(7.0).to("tpu")
        print(torch.tpu.spmd(lambda weight: torch.empty_like(weight).copy_(weight).sum())(weight).item())
        """
    )
    assert (done.returncode, done.stdout.split()) == (0, ["21.0"]), done.stderr


def test_a_write_without_a_look_at_what_was_there_is_a_result():
    target = torch.empty(3, device="tpu")

    @torch.tpu.spmd
    def fill(x: torch.Tensor) -> None:
        target.copy_(x * 2 + 1)
        target.fill_(7)
        torch.add(x, 1, out=target)

    fill(torch.zeros(3, device="tpu"))
    assert target.tolist() == [1, 1, 1]


def test_a_read_in_the_middle_ends_a_program_with_all_that_buffers_hold():
    x = torch.arange(3.0, device="tpu")

    @torch.tpu.spmd
    def function(x: torch.Tensor) -> tuple[torch.Tensor, float]:
        a = x + 1
        b = a * 2
        read = b.sum().item()
        return a.mul_(3) + b, read

    result, read = function(x)
    assert (result.tolist(), read) == ([5, 10, 15], 12)
    assert len(function.digests) == 2


def test_a_timed_event_in_the_middle_ends_a_segment():
    x = torch.arange(3.0, device="tpu")

    @torch.tpu.spmd
    def function(x: torch.Tensor) -> torch.Tensor:
        a = x + 1
        torch.tpu.Event(enable_timing=True).record()
        a.mul_(2)
        return a + x

    assert function(x).tolist() == [2, 5, 8]
    assert len(function.digests) == 2


def test_an_exception_leaves_what_was_computed_and_ends_the_region():
    x, made = torch.arange(3.0, device="tpu"), []

    @torch.tpu.spmd
    def function(x: torch.Tensor) -> None:
        made.append(x + 1)
        x.add_(2)
        raise KeyError("mine")

    for _ in range(2):
        with pytest.raises(KeyError, match="mine"):
            function(x)
    assert [each.tolist() for each in made] == [[1, 2, 3], [3, 4, 5]]
    assert x.tolist() == [4, 5, 6]
    assert (x + 1).tolist() == [5, 6, 7]


def test_a_tensor_that_is_an_attribute_of_a_module_is_a_result():
    """As the frequencies of transformers' rotary embeddings, which a forward pass makes for the next ones."""

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.made = None, torch.zeros(2, device="tpu")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.before, self.made = self.made, self.made + x
            return self.made * 2

    model = nn.Sequential(nn.Identity(), Counting())
    region = torch.tpu.spmd(lambda x: model(x))
    x = torch.ones(2, device="tpu")
    assert [region(x).tolist() for _ in range(3)] == [[2, 2], [4, 4], [6, 6]]
    assert (model[1].before.tolist(), model[1].made.tolist()) == ([2, 2], [3, 3])
    assert len(region.digests) == 1


def test_what_models_and_optimizers_hold_is_a_result_also_where_they_are_arguments():
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    def step_of(state: SimpleNamespace, x: torch.Tensor) -> None:
        step(state.model, state.optimizer, x)

    weights = []
    for takes_state, wraps in ((False, False), (False, True), (True, True)):
        torch.manual_seed(0)
        model = nn.Linear(4, 3).to("tpu")
        state = SimpleNamespace(model=model, optimizer=torch.optim.Adam(model.parameters(), lr=0.1))
        function = step_of if takes_state else step
        given = [state] if takes_state else [state.model, state.optimizer]
        call = torch.tpu.spmd(function) if wraps else function
        for _ in range(3):
            call(*given, torch.randn(5, 4).to("tpu"))
        weights.append(model.weight.tolist())
    assert weights[0] == weights[1] == weights[2]


@pytest.mark.parametrize("mode", ["strict", "debug"])
def test_in_other_modes_it_just_runs(mode: str):
    with torch.tpu.eager_mode(mode):
        region = torch.tpu.spmd(lambda x: x * 2 + 1)
        assert region(torch.ones(2, device="tpu")).tolist() == [3, 3]
    assert region.digests == ()


def test_inside_another_region_and_inside_a_captured_step_it_just_runs():
    inner = torch.tpu.spmd(lambda x: x * 2)
    outer = torch.tpu.spmd(lambda x: inner(x) + 1)
    x = torch.ones(3, device="tpu")
    assert outer(x).tolist() == [3, 3, 3]
    assert (len(outer.digests), inner.digests) == (1, ())
    captured = torch.tpu.capture(lambda x: inner(x) + 1)
    assert [captured(x).tolist() for _ in range(4)] == [[3, 3, 3]] * 4
    assert captured.problem is None
    replayed = torch.tpu.spmd(lambda x: captured(x) * 2)
    assert replayed(x).tolist() == [6, 6, 6]


def test_a_chain_becomes_one_program_at_a_run_that_all_processes_share():
    with torch.tpu.eager_mode("fused", parts="first"):
        step = Step(layers=24)
        counts = []
        for _ in range(260):
            step.run()
            counts.append(len(step.run.digests))
    assert counts[0] > 1  # makes the optimizer's state: another program
    assert set(counts[1:257]) == {counts[1]}
    assert counts[1] > 1
    assert counts[257:] == [1, 1, 1]


HISTORY = """
    import copy, json, os, random
    import torch
    from torch import nn
    from torch.nn import functional as F

    seed = int(os.environ["HISTORY"])
    chance = random.Random(seed)
    torch.manual_seed(0)


    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(11, 8)
            self.norm = nn.BatchNorm1d(8)
            self.inner = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
            self.head = nn.Linear(8, 11)

        def forward(self, tokens):
            x = self.norm(self.embed(tokens).flatten(0, 1))
            for layer in self.inner:
                x = x + torch.relu(layer(x))
            return self.head(x)


    model = Model().to("tpu")
    average = copy.deepcopy(model)
    if seed % 2:  # shares the values that the other process has twice
        average.load_state_dict(model.state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = torch.arange(400).remainder(11).to("tpu")
    seen = torch.empty(3, device="tpu")
    held = []


    def step(first, rate):
        window = data[first : first + 12].view(3, 4)
        optimizer.zero_grad()
        logits = model(window)
        loss = F.cross_entropy(logits, window.flatten())
        loss.backward()
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
        with torch.no_grad():
            for mine, other in zip(average.parameters(), model.parameters()):
                mine.lerp_(other, 0.1)
            seen.copy_(logits.flatten()[:3])
        return loss.detach(), logits.detach()


    if seed % 2:  # what the other process has never run
        other = copy.deepcopy(model)
        F.cross_entropy(other(data[5:17].view(3, 4)), data[5:17]).backward()
        torch.tpu.flush()
        held.append([each.grad for each in other.parameters()])

    region = torch.tpu.spmd(step)
    digests, losses = [], []
    for number in range(200):
        loss, logits = region(number % 17, 1e-2 / (1 + number))
        digests.append(region.digests)
        losses.append(loss)
        for _ in range(chance.randrange(4)):
            what = chance.randrange(8)
            if what == 0:
                held.append(loss)
            elif what == 1:
                held.append([each.detach().clone() for each in model.parameters()])
            elif what == 2:
                str(loss), float(seen[0])
            elif what == 3:
                held.append(logits * 2 + 1)  # pending where the next step begins
            elif what == 4:
                held.append([each.grad for each in model.parameters()])
            elif what == 5:
                held.append(copy.deepcopy(optimizer.state_dict()))
            elif what == 6:
                held.clear()
            else:
                with torch.no_grad():
                    model.eval()(data[number : number + 12].view(3, 4)).argmax(-1).tolist()
                    model.train()
    print(json.dumps({
        "digests": digests,
        "losses": [each.item().hex() for each in losses],
        "sums": [each.double().sum().item().hex() for each in average.state_dict().values()],
    }))
"""


def test_processes_with_other_histories_launch_the_same_programs():
    results = []
    for seed in (2, 7):
        ended = run_python(HISTORY, HISTORY=str(seed))
        assert ended.returncode == 0, ended.stderr
        results.append(json.loads(ended.stdout.splitlines()[-1]))
    assert results[0]["digests"] == results[1]["digests"]
    assert results[0]["losses"] == results[1]["losses"]
    assert results[0]["sums"] == results[1]["sums"]
    programs = [tuple(each) for each in results[0]["digests"]]
    assert len(programs) == 200
    by_start = {number % 17: program for number, program in enumerate(programs)}
    assert len({by_start[start] for start in range(2, 17)}) == 1
    assert len(set(programs)) == 3  # for the optimizer's state, the first start after that, other starts
