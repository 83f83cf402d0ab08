"""`execution.*`: in which form each phase runs, how `auto` chooses, and what compiles too often."""

import json
import time
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.tputrain.kept_records import KeptRecords
from tputrain import (
    Callback,
    CheckpointConfig,
    ExecutionConfig,
    LogConfig,
    OptimConfig,
    RunConfig,
    ScheduleConfig,
    Trainer,
    TrainerConfig,
    UserError,
)
from tputrain import device as devices
from tputrain.execution import Execution
from tputrain.execution_trial import BLOCK_STEPS, BLOCKS, WARM_STEPS, Trial

# Of a trial whose compiled step is built in the time of one: steps to the first of them, and to the choice.
SOONEST_COMPILED = WARM_STEPS + 1 + BLOCKS * BLOCK_STEPS
SOONEST_CHOICE = SOONEST_COMPILED + WARM_STEPS + BLOCKS * BLOCK_STEPS

AUTO = ExecutionConfig(train="auto", first_steps=0)
ALL_AUTO = ExecutionConfig(train="auto", validate="auto", first_steps=0)


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.dropout, self.down = nn.Linear(4, 8), nn.Dropout(0.25), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.dropout(torch.relu(self.up(x))))


def batches(sizes: list[int]) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(size, 4, generator=generator), torch.randint(3, (size,), generator=generator))
        for size in sizes
    ]


def fit(execution: ExecutionConfig, steps: int, model: nn.Module | None = None, **changes) -> KeptRecords:
    sizes, run_dir = changes.pop("sizes", [6] * steps), changes.pop("run_dir", None)
    optimizer, log_every = changes.pop("optimizer", None), changes.pop("log_every", 2)
    callbacks = changes.pop("callbacks", [])
    optim = changes.pop("optim", OptimConfig())
    schedule = changes.pop("schedule", ScheduleConfig(name="constant", warmup_steps=0))
    data = changes.pop("data", None) or batches(sizes)
    records = KeptRecords()
    Trainer(
        model or Classifier(),
        RunConfig(
            run_dir=None if run_dir is None else str(run_dir),
            device="tpu",
            trainer=TrainerConfig(steps=steps, **{"evaluate_every": 4} | changes),
            execution=execution,
            optim=optim,
            schedule=schedule,  # the default is not of how many steps there are
            checkpoint=CheckpointConfig(every=4),
            log=LogConfig(every=log_every, progress="none"),
        ),
        train_loader=data,
        val_loader=batches([6, 6]),
        loss_fn=F.cross_entropy,
        optimizer=optimizer,
        loggers=[records],
        callbacks=callbacks,
    ).fit()
    torch._dynamo.reset()
    return records


def losses(records: KeptRecords) -> dict[int, str]:
    return {record["step"]: record["loss_hex"] for record in records.steps}


def test_phases_in_every_form_compute_the_same():
    fused = fit(ExecutionConfig(), 6)
    for form in ("debug", "strict", "compile", "captured"):
        other = fit(ExecutionConfig(train=form, validate="fused" if form == "captured" else form), 6)
        for kind in ("steps", "evaluations"):
            losses = [[record["loss"] for record in getattr(run, kind)] for run in (fused, other)]
            assert losses[0] == pytest.approx(losses[1], rel=1e-5)
        assert any("tpu_graph" in call for call, _ in torch.tpu.recent_ops()) == (form == "compile")


def test_a_compiled_run_resumes_to_the_bit(tmp_path):
    compiled = ExecutionConfig(train="compile", validate="compile")
    whole = fit(compiled, 8)
    first = fit(compiled, 4, run_dir=tmp_path, sizes=[6] * 8)
    second = fit(compiled, 8, run_dir=tmp_path)
    assert losses(first) | losses(second) == losses(whole)
    assert min(losses(second)) == 5


class SizesSeen(Callback):
    def __init__(self) -> None:
        self.padded: set[bool] = set()

    def on_step_end(self, *_: object) -> None:
        self.padded.add(torch.tpu.get_pad_sizes())

    on_evaluate = on_step_end


def test_the_trainer_pads_no_sizes():
    seen = SizesSeen()
    with torch.tpu.pad_sizes(True):
        fit(ExecutionConfig(), 4, callbacks=[seen])
        assert torch.tpu.get_pad_sizes()
    assert seen.padded == {False}


CAPTURED = ExecutionConfig(train="captured", first_steps=2)


def replays() -> int:
    return torch.tpu.compile_stats()["replays"]


class Normed(Classifier):
    """With buffers that each step changes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.dropout(self.norm(torch.relu(self.up(x)))))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"accumulate": 2, "sizes": [6, 6, 6, 5] * 12},
        {"on_nonfinite": "skip"},
        {"optim": OptimConfig(name="sgd")},
        {"optim": OptimConfig(master_weights=True)},
    ],
    ids=lambda changes: "-".join(map(str, changes)) or "plain",
)
def test_a_captured_run_is_the_fused_one_and_most_of_its_steps_are_replays(changes, monkeypatch):
    learns = {"schedule": ScheduleConfig(name="cosine", warmup_steps=3)}
    has_masters = changes.get("optim", OptimConfig()).master_weights
    form = replace(CAPTURED, autocast="bfloat16" if has_masters else None)
    before = replays()
    captured = fit(form, 20, Normed(), **learns, **changes)
    assert replays() >= before + 10
    monkeypatch.setattr(Execution, "captures", False)  # the same optimizer, run by Python
    assert losses(fit(form, 20, Normed(), **learns, **changes)) == losses(captured)


def test_a_captured_run_resumes_to_the_bit_and_after_a_fused_one(tmp_path):
    whole = fit(CAPTURED, 12)
    first = fit(CAPTURED, 4, run_dir=tmp_path / "a", sizes=[6] * 12)
    second = fit(CAPTURED, 12, run_dir=tmp_path / "a")
    assert losses(first) | losses(second) == losses(whole)
    fused = ExecutionConfig(first_steps=2)
    expected = losses(fit(fused, 12))
    for number, forms in enumerate([(fused, CAPTURED), (CAPTURED, fused)]):
        run_dir = tmp_path / str(number)
        found = {}
        for form, steps in zip(forms, (4, 12), strict=True):
            found |= losses(fit(form, steps, run_dir=run_dir, sizes=[6] * 12))
        assert [float.fromhex(found[step]) for step in sorted(found)] == pytest.approx(
            [float.fromhex(expected[step]) for step in sorted(expected)], rel=1e-5
        )


@pytest.mark.parametrize("policy", ["rollback", "skip"])
def test_a_captured_run_leaves_out_what_a_fused_one_does(policy, tmp_path):
    data = batches([6] * 24)
    data[14][0][0, 0] = float("nan")
    found = {}
    for form in (CAPTURED, ExecutionConfig(train="fused", first_steps=2)):
        model = Classifier().to("tpu")
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        run_dir = tmp_path / form.train
        found[form.train] = losses(
            fit(form, 24, model, optimizer=optimizer, data=data, run_dir=run_dir, on_nonfinite=policy)
        )
    assert found["captured"] == found["fused"]
    assert len(found["captured"]) >= 23


def test_a_micro_batch_without_labels_is_left_out_of_a_captured_step(tmp_path):
    data = batches([6] * 40)
    data[25][1].fill_(-100)
    found = [
        losses(fit(form, 20, data=data, accumulate=2)) for form in (CAPTURED, ExecutionConfig(first_steps=2))
    ]
    assert [float.fromhex(loss) for loss in found[0].values()] == pytest.approx(
        [float.fromhex(loss) for loss in found[1].values()], rel=1e-5
    )


def test_a_limit_that_moves_is_not_captured():
    with pytest.raises(
        UserError, match=r"trainer\.spike_factor=2\.0: expected none with execution\.train=captured"
    ):
        RunConfig(trainer=TrainerConfig(spike_factor=2.0), execution=CAPTURED)


@pytest.mark.parametrize(
    "optim",
    [OptimConfig(name="adafactor"), OptimConfig(name="muon"), OptimConfig(ema_decay=0.9)],
    ids=lambda optim: optim.name,
)
def test_what_computes_on_the_host_in_each_step_is_not_captured(optim):
    with pytest.raises(UserError, match=r"execution\.train=captured: expected another form, as optim"):
        RunConfig(optim=optim, execution=CAPTURED)
    with pytest.raises(
        UserError, match=r"execution\.validate=captured: expected fused, or compile: captured is"
    ):
        ExecutionConfig(validate="captured")


class Deep(nn.Module):
    """Enough alike layers to be cut between them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.dropout, self.head = nn.Dropout(0.25), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            y = layer(F.layer_norm(x, (4,))).tanh().exp().log1p().sigmoid() * torch.cos(x).square().sqrt()
            x = x + self.dropout(F.gelu(y - y.mean(-1, keepdim=True)))
        return self.head(x)


def programs_of(operation: str) -> list[int]:
    """How many operations each program compiled so far has, of those with this one."""
    return [
        len(each.operations)
        for each in torch.tpu.compilations()
        if any(operation in name for name in each.operations)
    ]


def test_first_steps_are_in_parts_and_a_resumed_run_changes_over_at_the_same_step(
    tmp_path, capsys, monkeypatch
):
    early = ExecutionConfig(first_steps=6)
    assert ExecutionConfig().first_steps > 0
    monkeypatch.setattr(devices, "is_compiling_ahead", lambda _: True)
    whole = fit(early, 10, Deep())
    assert "step 7, the first that is fused, is recorded" in capsys.readouterr().out
    first = fit(early, 4, Deep(), run_dir=tmp_path, sizes=[6] * 10)
    second = fit(early, 8, Deep(), run_dir=tmp_path, sizes=[6] * 10)
    third = fit(early, 10, Deep(), run_dir=tmp_path)
    assert losses(first) | losses(second) | losses(third) == losses(whole)
    fused = fit(ExecutionConfig(first_steps=0), 10, Deep())
    assert [each["loss"] for each in whole.steps] == pytest.approx(
        [each["loss"] for each in fused.steps], rel=1e-4
    )
    assert max(programs_of("gelu_backward")) > 4 * 12
    assert min(programs_of("gelu_backward")) < 60


def test_nothing_is_said_where_the_program_is_there_when_the_first_steps_are_over(capsys, monkeypatch):
    monkeypatch.setattr(devices, "is_compiling_ahead", lambda _: False)
    fit(ExecutionConfig(first_steps=3), 6)
    said = capsys.readouterr().out
    assert "step 1, the first of this process" in said
    assert "that is fused" not in said


@pytest.fixture
def built_at_once(monkeypatch):
    """The compiled step is there one step after threads have begun with it. The number of its program."""
    program: list[int] = []

    def wait(_: torch.device) -> bool:
        while torch.tpu.is_compiling_ahead():
            time.sleep(0.01)
        program[:] = [each.number for each in torch.tpu.compilations()[-1:]]
        return False

    monkeypatch.setattr(devices, "is_compiling_ahead", wait)
    return program


@torch.compiler.disable
def dawdle() -> None:
    time.sleep(0.03)


class SlowWhere(Classifier):
    def __init__(self, compiled: bool):
        super().__init__()
        self.slow_where_compiled = compiled

    def forward(self, x: Tensor) -> Tensor:
        if self.training and torch.compiler.is_compiling() == self.slow_where_compiled:
            dawdle()
        return super().forward(x)


@pytest.mark.parametrize(
    ("slow_where_compiled", "line"),
    [
        (False, f"compile from step {SOONEST_CHOICE + 1} on; a compiled step takes"),
        (True, "stays fused; a compiled step takes"),
    ],
)
@pytest.mark.usefixtures("built_at_once")
def test_auto_measures_both_and_says_what_it_chose(slow_where_compiled, line, tmp_path, capsys):
    steps = SOONEST_CHOICE + 2
    changes = {"run_dir": tmp_path, "evaluate_every": None}
    fit(ALL_AUTO, steps, SlowWhere(slow_where_compiled), **changes)
    said = [each for each in capsys.readouterr().out.splitlines() if "execution.train=auto" in each]
    assert "a compiled step is recorded, threads compile it" in said[0]
    assert line in said[-1]
    assert sum("compiled step takes" in each for each in said) == 1
    newest = tmp_path / "checkpoints" / f"step-{steps}" / "state.json"
    state = json.loads(newest.read_text())["execution"]
    assert state["chosen"] == ("fused" if slow_where_compiled else "compile")
    # What the checkpoint says holds, whatever would be measured now.
    torch.tpu.flush()
    fit(ALL_AUTO, steps + 2, SlowWhere(not slow_where_compiled), **changes, sizes=[6] * (steps + 2))
    assert "execution.train=auto" not in capsys.readouterr().out
    assert (
        json.loads((newest.parents[1] / f"step-{steps + 2}" / "state.json").read_text())["execution"] == state
    )


def test_elsewhere_than_on_the_device_no_step_is_in_parts():
    execution = Execution(Classifier(), torch.device("cpu"), ExecutionConfig(first_steps=5), lambda: 0)
    with execution.phase("train"):
        assert [execution.before_step(step) for step in (0, 4, 5, 6)] == [True, False, False, False]


@pytest.mark.parametrize("form", ["auto", "captured"])
def test_a_run_that_is_in_parts_up_to_its_end_says_so(form, capsys):
    fit(ExecutionConfig(train=form, first_steps=2), 2, evaluate_every=None)
    assert f"execution.train={form}: not reached, as the first 2 steps of a run are in parts" in (
        capsys.readouterr().out
    )


class Stop(Callback):
    def on_step_end(self, trainer: Trainer) -> None:
        trainer.control.stop = True


def test_a_run_that_is_stopped_while_it_is_in_parts_says_nothing(capsys):
    fit(ExecutionConfig(train="captured", first_steps=2), 4, evaluate_every=None, callbacks=[Stop()])
    assert "not reached" not in capsys.readouterr().out


@pytest.mark.usefixtures("built_at_once")
def test_what_auto_waits_for_the_device_is_time_of_its_steps(monkeypatch):
    monkeypatch.setattr(devices, "wait", lambda _: time.sleep(0.1))
    first = SOONEST_COMPILED - BLOCKS * BLOCK_STEPS + 1
    records = fit(AUTO, SOONEST_COMPILED, evaluate_every=None, log_every=1).steps
    seconds = {each["step"]: each["step_seconds"] for each in records}
    edges = [first + block * BLOCK_STEPS + place for block in range(BLOCKS) for place in (0, BLOCK_STEPS - 1)]
    assert all(seconds[step] >= 0.1 for step in edges)


class SaysItsMode(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.modes: list[tuple[str, str]] = []

    def forward(self, x: Tensor) -> Tensor:
        if self.training and not torch.compiler.is_compiling():
            self.modes.append((torch.tpu.get_eager_mode(), torch.tpu.get_parts()))
        return super().forward(x)


@pytest.mark.usefixtures("built_at_once")
def test_auto_begins_its_trial_behind_the_steps_in_parts(tmp_path, capsys):
    auto = ExecutionConfig(train="auto", first_steps=3)
    changes = {"run_dir": tmp_path, "evaluate_every": None}
    model = SaysItsMode()
    steps = 3 + SOONEST_COMPILED
    fit(auto, steps, model, **changes)
    assert model.modes == [("fused", "prepare")] * 3 + [("fused", "never")] * SOONEST_COMPILED
    newest = tmp_path / "checkpoints" / f"step-{steps}" / "state.json"
    record = json.loads(newest.read_text())["execution"]
    assert (record["begun_at"], record["ready_at"]) == (3, 8)
    assert "the run ended before fused and compiled steps were both measured" in capsys.readouterr().out
    resumed = SaysItsMode()
    fit(auto, steps + 1, resumed, **changes, sizes=[6] * (steps + 1))
    assert ("fused", "prepare") not in resumed.modes


@pytest.mark.parametrize(
    ("record", "form"),
    [
        ({"begun_at": 0, "seconds": {}, "chosen": "compile"}, "compile"),
        ({"begun_at": 0, "form": "compile", "chosen": "fused"}, "fused"),
        ({"begun_at": 0, "ready_at": 5, "form": "compile", "chosen": None}, "compile"),  # in the middle of it
        ({"begun_at": 0, "form": "compile", "chosen": None}, "fused"),  # of a trial without a rehearsal
        ({"begun_at": None}, "fused"),
    ],
)
def test_before_the_first_step_of_a_resumed_run_evaluations_run_as_they_did(record, form):
    model = Classifier()
    cfg = ExecutionConfig(train="auto", validate="auto", sample="auto")
    execution = Execution(model, torch.device("tpu"), cfg)
    execution.restore(record)
    for phase in ("train", "validate", "sample"):
        with execution.phase(phase):
            assert (execution.model is not model) == (form == "compile")


def test_what_another_process_measured_is_not_compared_with():
    """Resumed among the compiled steps the run goes on with them, and then measures both forms itself."""
    trial, forms = Trial(torch.device("cpu")), []
    for step in range(SOONEST_CHOICE + 28):
        if step == SOONEST_COMPILED + 6:
            assert trial.state()["seconds"].keys() == {"fused"}
            trial = Trial(torch.device("cpu"), **trial.state())
        forms.append(trial.before_step(step))
        trial.after_step(step + 1)
        assert (trial.state()["chosen"] is None) == (step < SOONEST_CHOICE - 2 + 28)
    compiled = WARM_STEPS + BLOCKS * BLOCK_STEPS
    again = ["fused"] * BLOCKS * BLOCK_STEPS + ["compile"] * compiled
    assert forms[-1 - len(again) - compiled : -1] == ["compile"] * compiled + again


def rehearse(execution: Execution) -> None:
    if execution.wants_rehearsal:
        with execution.rehearsed():
            pass


def test_the_first_step_of_each_form_is_one_whatever_an_evaluation_has_compiled():
    execution = Execution(
        Classifier(), torch.device("tpu"), ExecutionConfig(train="auto", validate="compile", first_steps=0)
    )
    with execution.phase("validate"):
        assert execution.model is not None  # the compiled one
    firsts = {}
    for step in range(SOONEST_CHOICE):
        if execution.before_step(step):
            firsts[step] = execution.first_of
        rehearse(execution)
        execution.after_step(step + 1)
    assert firsts == {0: "of this process", SOONEST_COMPILED: "by torch.compile"}


def test_from_the_choice_on_evaluations_run_in_the_form_chosen():
    model = Classifier()
    execution = Execution(model, torch.device("tpu"), ALL_AUTO)
    for step in range(SOONEST_CHOICE):
        execution.before_step(step)
        rehearse(execution)
        execution.after_step(step + 1)
        with execution.phase("validate"):
            live = execution.model
        resumed = Execution(model, torch.device("tpu"), ALL_AUTO)
        resumed.restore(execution.state())
        with resumed.phase("validate"):
            assert (live is model) == (resumed.model is model)


@pytest.mark.usefixtures("built_at_once")
def test_random_numbers_do_not_change_by_switching():
    fused, auto = (
        fit(ExecutionConfig(train=form, first_steps=0), SOONEST_CHOICE + 2, evaluate_every=None)
        for form in ("fused", "auto")
    )
    losses = [[record["loss"] for record in run.steps] for run in (fused, auto)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


class HasState(nn.Module):
    """What a step changes: averages, random numbers of host and device, and attributes of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.norm, self.dropout = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.25)
        self.down = nn.Linear(8, 3)
        self.last, self.earlier, self.calls = None, [], 0

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.dropout(self.norm(self.up(x + torch.rand(1).to(x.device))))
        self.remember(hidden)
        return self.down(hidden)

    @torch.compiler.disable
    def remember(self, hidden: Tensor) -> None:
        self.calls += 1
        self.last = hidden.detach() * self.calls
        self.earlier = [*self.earlier[-1:], self.last]


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}])
def test_the_rehearsal_changes_no_bit_and_the_step_is_there_when_it_comes(options, built_at_once, capsys):
    runs, models = {}, {}
    for form in ("fused", "auto"):
        model = HasState()
        optimizer = torch.optim.AdamW(model.parameters(), **options)  # foreach: counts its steps on the host
        runs[form] = fit(
            ExecutionConfig(train=form, first_steps=0),
            SOONEST_COMPILED + 2,
            model,
            optimizer=optimizer,
            optim=OptimConfig(ema_decay=0.9),
            evaluate_every=None,
            log_every=1,
        )
        models[form] = model
    before = {form: [each["loss_hex"] for each in run.steps][:SOONEST_COMPILED] for form, run in runs.items()}
    assert before["auto"] == before["fused"]
    assert models["auto"].calls == models["fused"].calls
    assert len(models["auto"].earlier) == 2
    assert all(each.isfinite().all() for each in models["auto"].earlier)
    said = capsys.readouterr().out
    assert f"step {SOONEST_COMPILED + 1}, the first by torch.compile" in said
    later = [each for each in torch.tpu.compilations() if each.number > built_at_once[0]]
    assert not any("tpu_graph" in name for each in later for name in each.operations)


@pytest.mark.usefixtures("built_at_once")
def test_a_step_that_cannot_be_rehearsed_is_compiled_when_it_comes(capsys):
    class Reads(Classifier):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            if self.training and y.sum().item() > 1e9:
                return 2 * y
            return y

    records = fit(AUTO, SOONEST_CHOICE + 1, Reads(), evaluate_every=None)
    said = capsys.readouterr().out
    assert "is not built in the background but when its first step comes, since recording it failed" in said
    assert "a compiled step takes" in said
    assert len(records.steps) == SOONEST_CHOICE + 1


def test_an_unknown_form_is_refused():
    with pytest.raises(UserError, match=r"execution.train=fast: expected one of debug, strict, fused, comp"):
        ExecutionConfig(train="fast")


def test_the_recompile_budget_names_what_compiles(capsys):
    fit(ExecutionConfig(), 6, sizes=[6, 6, 6, 7, 8, 9], recompile_budget=2, evaluate_every=None)
    said = [each for each in capsys.readouterr().out.splitlines() if each.startswith("warning")]
    assert len(said) == 1
    assert "steps up to 6 have compiled 3 programs, the first step left out" in said[0]
    assert "; 3 of the programs because of shape: " in said[0]
    assert "test_execution.py:" in said[0]
    assert said[0].endswith("(the last of them)")


def test_within_the_budget_nothing_is_said(capsys):
    fit(ExecutionConfig(), 6, sizes=[6, 6, 6, 7, 8, 6], recompile_budget=2, evaluate_every=None)
    assert "warning" not in capsys.readouterr().out


def test_elsewhere_nothing_is_rehearsed():
    execution = Execution(Classifier(), torch.device("cpu"), AUTO)
    forms = []
    for step in range(SOONEST_CHOICE - 1):
        execution.before_step(step)
        assert not execution.wants_rehearsal
        with execution.phase("train"):
            forms.append(execution.model is not execution._model)
        execution.after_step(step + 1)
    assert forms == [False] * (SOONEST_COMPILED - 1) + [True] * (SOONEST_CHOICE - SOONEST_COMPILED)
