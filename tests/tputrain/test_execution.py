"""`execution.*`: in which form each phase runs, and what compiles too often."""

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
    optimizer = changes.pop("optimizer", None)
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
            log=LogConfig(every=2, progress="none"),
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


def test_elsewhere_than_on_the_device_no_step_is_in_parts():
    execution = Execution(Classifier(), torch.device("cpu"), ExecutionConfig(first_steps=5), lambda: 0)
    with execution.phase("train"):
        assert [execution.before_step() for _ in range(4)] == [True, False, False, False]


class PartsSeen(Callback):
    def __init__(self) -> None:
        self.between_steps: list[str] = []

    def on_step_end(self, *_: object) -> None:
        self.between_steps.append(torch.tpu.get_parts())


def test_what_comes_between_steps_has_the_form_of_the_next_one():
    seen = PartsSeen()
    fit(ExecutionConfig(first_steps=2), 3, callbacks=[seen])
    assert seen.between_steps == ["prepare", "never", "never"]


def test_a_run_that_is_in_parts_up_to_its_end_says_so(capsys):
    fit(CAPTURED, 2, evaluate_every=None)
    assert "execution.train=captured: not reached, as the first 2 steps of a run are in parts" in (
        capsys.readouterr().out
    )


class Stop(Callback):
    def on_step_end(self, trainer: Trainer) -> None:
        trainer.control.stop = True


def test_a_run_that_is_stopped_while_it_is_in_parts_says_nothing(capsys):
    fit(ExecutionConfig(train="captured", first_steps=2), 4, evaluate_every=None, callbacks=[Stop()])
    assert "not reached" not in capsys.readouterr().out


def test_an_unknown_form_is_refused():
    with pytest.raises(UserError, match=r"execution.train=fast: expected one of debug, strict, fused, comp"):
        ExecutionConfig(train="fast")


def test_the_recompile_budget_names_what_compiles(capsys):
    # Sizes that no other test has: an operation is told by the line that first called it in this form.
    sizes = [6, 6, 6, 1007, 1008, 1009]
    fit(ExecutionConfig(), 6, sizes=sizes, recompile_budget=2, evaluate_every=None)
    said = [each for each in capsys.readouterr().out.splitlines() if each.startswith("warning")]
    assert len(said) == 1
    assert "steps up to 6 have compiled 3 programs, the first step left out" in said[0]
    assert "; 3 of the programs because of shape: " in said[0]
    assert "test_execution.py:" in said[0]
    assert said[0].endswith("(the last of them)")


def test_within_the_budget_nothing_is_said(capsys):
    fit(ExecutionConfig(), 6, sizes=[6, 6, 6, 7, 8, 6], recompile_budget=2, evaluate_every=None)
    assert "warning" not in capsys.readouterr().out
