"""A run that was stopped, however it was stopped, goes on as if it had not been."""

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.tputrain.resumable_run import STEPS, TiedModel, build
from tputrain import (
    CheckpointConfig,
    JointOptimizer,
    OptimConfig,
    RunConfig,
    ScheduleConfig,
    Trainer,
    TrainerConfig,
    UserError,
)
from tputrain.callbacks.callback import Callback
from tputrain.checkpoint import state
from tputrain.loggers.jsonl import read_jsonl
from tputrain.optim.given_options import GivenOptions
from tputrain.snapshot import contents

ROOT = Path(__file__).resolve().parents[2]


def losses(run_dir: Path) -> dict[int, str]:
    """Each step's loss as hex; fails where a step is there twice or out of order."""
    records = read_jsonl(run_dir / "metrics.jsonl")
    steps = [record["step"] for record in records]
    assert steps == list(range(1, len(steps) + 1))
    return {record["step"]: record["loss_hex"] for record in records}


def evaluations(run_dir: Path) -> list[tuple[int, str]]:
    return [(record["step"], record["loss_hex"]) for record in read_jsonl(run_dir / "evaluations.jsonl")]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("uninterrupted")
    build(run_dir).fit()
    assert len(losses(run_dir)) == STEPS
    assert [step for step, _ in evaluations(run_dir)] == [0, 4, 8, 12, STEPS]
    return run_dir


def assert_same_run(run_dir: Path, uninterrupted: Path) -> None:
    assert losses(run_dir) == losses(uninterrupted)
    assert evaluations(run_dir) == evaluations(uninterrupted)
    for name in ("model.safetensors", "optimizer.safetensors"):
        last = f"checkpoints/step-{STEPS}/{name}"
        ours, theirs = load_file(run_dir / last), load_file(uninterrupted / last)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def run_until_signal(run_dir: Path, moment: str, step: int) -> int:
    command = [sys.executable, "-m", "tests.tputrain.resumable_run", str(run_dir), moment, str(step)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, timeout=300).returncode


@pytest.mark.parametrize(
    ("moment", "step"),
    [
        # Another step at every run of the tests; a failure names it.
        ("kill-step", random.randint(1, STEPS - 1)),
        ("kill-save", random.choice([3, 6, 9, 12])),
        ("kill-seal", random.choice([3, 6, 9, 12])),
        ("kill-evaluation", random.choice([4, 8, 12])),
    ],
    ids=["step", "save", "seal", "evaluation"],
)
def test_after_sigkill_every_loss_is_the_uninterrupted_runs(tmp_path, uninterrupted, moment, step):
    assert run_until_signal(tmp_path, moment, step) == -signal.SIGKILL, (moment, step)
    build(tmp_path).fit()
    assert_same_run(tmp_path, uninterrupted)
    assert not list((tmp_path / "checkpoints").glob(".unfinished*"))


@pytest.mark.parametrize(
    ("moment", "step", "code"),
    [("int-step", 7, 130), ("term-evaluation", 8, 143), ("term-start", 0, 143)],
)
def test_a_polite_signal_saves_first_and_loses_no_step(tmp_path, uninterrupted, moment, step, code):
    assert run_until_signal(tmp_path, moment, step) == code
    assert (tmp_path / "checkpoints" / f"step-{step}" / "COMPLETE").exists()
    assert len(losses(tmp_path)) == step
    build(tmp_path).fit()
    assert_same_run(tmp_path, uninterrupted)


class StopAt(Callback):
    def __init__(self, step: int):
        self.step = step

    def on_step_end(self, trainer: Trainer) -> None:
        trainer.control.stop = trainer.step >= self.step


def fit_until(run_dir: Path, step: int) -> None:
    trainer = build(run_dir)
    trainer.callbacks.append(StopAt(step))
    trainer.fit()


def test_a_run_stopped_after_every_step_has_the_uninterrupted_runs_losses(tmp_path, uninterrupted):
    for step in (1, 2, 5, 6, 7, 12):
        fit_until(tmp_path, step)
    build(tmp_path).fit()
    assert losses(tmp_path) == losses(uninterrupted)


def test_a_damaged_newest_checkpoint_costs_only_the_steps_since_the_one_before(
    tmp_path, uninterrupted, capsys
):
    fit_until(tmp_path, 10)
    model = tmp_path / "checkpoints" / "step-10" / "model.safetensors"
    content = bytearray(model.read_bytes())
    content[len(content) // 2] ^= 1
    model.write_bytes(content)
    build(tmp_path).fit()
    said = capsys.readouterr().out
    assert "step-10 refused: model.safetensors: damaged" in said
    assert "it is refused-step-10-1 now, and step-9 is used" in said
    assert "step-9 at step 9" in said
    assert losses(tmp_path) == losses(uninterrupted)


def test_where_no_checkpoint_is_whole_nothing_is_begun_anew_and_nothing_is_lost(tmp_path):
    fit_until(tmp_path, 4)
    for step in (3, 4):
        (tmp_path / "checkpoints" / f"step-{step}" / "model.safetensors").unlink()
    logged = (tmp_path / "metrics.jsonl").read_bytes()
    for _ in range(2):  # also after the first attempt
        with pytest.raises(
            UserError, match=r"no whole checkpoint .*step-4: model.safetensors: missing; step-3"
        ):
            build(tmp_path).fit()
    # Not even where all that is left was set aside by an earlier resume.
    for step in (3, 4):
        (tmp_path / "checkpoints" / f"step-{step}").rename(
            tmp_path / "checkpoints" / f"refused-step-{step}-1"
        )
    with pytest.raises(
        UserError, match=r"no whole checkpoint .*begin anew with another run_dir or by removing"
    ):
        build(tmp_path).fit()
    assert (tmp_path / "metrics.jsonl").read_bytes() == logged


def test_a_finished_run_is_left_alone(tmp_path, uninterrupted, capsys):
    def stamps() -> dict[str, int]:
        return {str(path): path.stat().st_mtime_ns for path in (uninterrupted / "checkpoints").rglob("*")}

    before, logged = stamps(), losses(uninterrupted)
    build(uninterrupted).fit()
    assert (
        f"finished: step {STEPS} is done, trainer.steps={STEPS}; raise it to go on" in capsys.readouterr().out
    )
    assert (stamps(), losses(uninterrupted)) == (before, logged)


def test_a_finished_run_can_be_made_longer(tmp_path):
    build(tmp_path, trainer=TrainerConfig(steps=4)).fit()
    build(tmp_path, trainer=TrainerConfig(steps=6)).fit()
    assert list(losses(tmp_path)) == [1, 2, 3, 4, 5, 6]


def test_a_run_made_longer_says_that_its_learning_rate_jumps_and_what_keeps_it(tmp_path, capsys):
    def train(run: str, length: int, name: str = "cosine", steps: int | None = None) -> tuple[list, list]:
        cfg = {"trainer": TrainerConfig(steps=length), "schedule": ScheduleConfig(name, steps=steps)}
        build(tmp_path / run, optim=OptimConfig(learning_rate=0.1), **cfg).fit()
        notes = [line for line in capsys.readouterr().out.splitlines() if "jumps" in line]
        rates = [record["learning_rate"] for record in read_jsonl(tmp_path / run / "metrics.jsonl")]
        return rates, notes

    assert train("stretched", 5)[1] == []
    rates, (note,) = train("stretched", 10)
    assert note == (
        f"note: the learning rate jumps from {rates[4]:.3g} to {rates[5]:.3g}: schedule.name=cosine spans "
        f"trainer.steps=10 now, 5 before; schedule.steps=5 goes on at {rates[4]:.3g} instead, without a jump"
    )
    assert rates[5] > 4 * rates[4]
    train("kept", 5)
    rates, notes = train("kept", 10, steps=5)
    assert (rates[5:], notes) == ([pytest.approx(rates[4])] * 5, [])
    assert train("constant", 5, "constant")[1] == train("constant", 10, "constant")[1] == []


def test_weights_tied_before_a_resume_are_tied_after_it(tmp_path):
    build(tmp_path).fit()
    trainer = build(tmp_path)
    assert trainer.resume()
    assert trainer.model.decode.weight is trainer.model.encode.weight
    saved = load_file(tmp_path / "checkpoints" / f"step-{STEPS}" / "model.safetensors")
    assert sorted(saved) == ["decode.bias", "encode.bias", "encode.weight", "norm.bias", "norm.weight"]


def test_resume_never_refuses_a_directory_that_holds_a_run(tmp_path):
    build(tmp_path, trainer=TrainerConfig(steps=1)).fit()
    with pytest.raises(UserError, match="resume=never: choose another run_dir"):
        build(tmp_path, checkpoint=CheckpointConfig(resume="never")).fit()


def test_two_processes_cannot_train_in_one_directory(tmp_path):
    class Nested(Callback):
        def on_step_end(self, trainer: Trainer) -> None:
            with pytest.raises(UserError, match=r"another process .* is training here"):
                build(tmp_path).fit()

    trainer = build(tmp_path, trainer=TrainerConfig(steps=2))
    trainer.callbacks.append(Nested())
    trainer.fit()
    assert trainer.step == 2


def test_a_checkpoint_of_another_model_is_one_clear_error(tmp_path):
    build(tmp_path).fit()
    checkpoint = tmp_path / "checkpoints" / f"step-{STEPS}"
    wider = Trainer(nn.Linear(2, 2), RunConfig(device="cpu"))
    with pytest.raises(
        UserError, match=r"model.safetensors: the model has a tensor 'bias' that the file has not"
    ):
        wider.resume(checkpoint)
    model = TiedModel()
    model.norm = nn.LayerNorm(3)
    with pytest.raises(UserError, match=r"norm.weight has shape \(6,\), the model's has \(3,\)"):
        Trainer(model, RunConfig(device="cpu")).resume(checkpoint)


@pytest.mark.parametrize(("first", "second"), [("sgd", "adamw"), ("adamw", "sgd")])
def test_a_run_goes_on_only_with_the_optimizer_it_was_started_with(tmp_path, first, second):
    build(tmp_path, trainer=TrainerConfig(steps=1), optim=OptimConfig(name=first)).fit()
    trainer = build(tmp_path, optim=OptimConfig(name=second))
    kinds = {"sgd": "SGD", "adamw": "AdamW"}
    with pytest.raises(
        UserError, match=f"the state of {kinds[first]}, and this run's optimizer is {kinds[second]}: "
    ):
        trainer.fit()


def test_the_parts_of_a_joint_optimizer_stay_in_their_order(tmp_path, monkeypatch):
    def fit(steps: int, *kinds: type[torch.optim.Optimizer]) -> None:
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        parts = [kind([parameter], lr=0.1) for kind, parameter in zip(kinds, model.parameters(), strict=True)]
        cfg = RunConfig(device="cpu", run_dir=str(tmp_path), trainer=TrainerConfig(steps=steps))
        batches = [(torch.ones(3, 4), torch.tensor([0, 1, 1]))]
        Trainer(model, cfg, train_loader=batches, optimizer=JointOptimizer(*parts)).fit()

    adamw, sgd = torch.optim.AdamW, torch.optim.SGD
    with monkeypatch.context() as earlier:  # checkpoints said no parts
        earlier.setattr(contents, "_kind", lambda optimizer: type(optimizer).__name__)
        fit(1, adamw, sgd)
    fit(2, adamw, sgd)
    kinds = "state of JointOptimizer of AdamW and SGD, and .* optimizer is JointOptimizer of SGD and AdamW: "
    with pytest.raises(UserError, match=kinds):
        fit(3, sgd, adamw)


def test_a_checkpoint_in_a_newer_format_is_one_clear_error(tmp_path, monkeypatch):
    with monkeypatch.context() as newer:
        newer.setattr(state, "FORMAT", state.FORMAT + 1)
        build(tmp_path, trainer=TrainerConfig(steps=1)).fit()
    with pytest.raises(
        UserError, match=r"state.json: format 2, written by tputrain .*; this one reads formats up to 1"
    ):
        build(tmp_path).fit()


def test_batches_with_another_fingerprint_are_not_gone_on_with(tmp_path, capsys):
    class Loader:
        def __init__(self, fingerprint: str | None):
            self.fingerprint = fingerprint

        def batch_at(self, step: int, micro: int):
            return torch.ones(2, 4), torch.tensor([0, 1])

    def run(loader: Loader, steps: int) -> None:
        cfg = RunConfig(device="cpu", run_dir=str(tmp_path), trainer=TrainerConfig(steps=steps))
        Trainer(nn.Linear(4, 2), cfg, train_loader=loader).fit()

    run(Loader(None), 1)
    run(Loader("first"), 2)
    assert "note: the checkpoint does not say which data it was made with" in capsys.readouterr().out
    with pytest.raises(
        UserError, match=r"\(data.files in a recipe\) is not what the run .* choose another run_dir"
    ):
        run(Loader("second"), 3)
    assert list(losses(tmp_path)) == [1, 2]


def rates_of_a_run_in_parts(directory: Path, optimized, scheduled) -> list[float]:
    """The learning rates of six steps in four runs, which resume, and whose losses are those of one run."""

    def run(run_dir: Path, steps: int) -> None:
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        optimizer = optimized(model.parameters())
        scheduler = scheduled(optimizer)
        batches = [(torch.randn(3, 4), torch.tensor([0, 1, 1])) for _ in range(3)]
        cfg = RunConfig(device="cpu", run_dir=str(run_dir), trainer=TrainerConfig(steps=steps))
        Trainer(model, cfg, train_loader=batches, optimizer=optimizer, lr_scheduler=scheduler).fit()

    run(directory / "whole", 6)
    for steps in (1, 3, 4, 6):
        run(directory / "parts", steps)
    assert losses(directory / "parts") == losses(directory / "whole")
    whole, parts = (
        [record["learning_rate"] for record in read_jsonl(directory / name / "metrics.jsonl")]
        for name in ("whole", "parts")
    )
    assert parts == whole
    return parts


@pytest.mark.parametrize("as_lr", [float, torch.tensor], ids=["number", "tensor"])
@pytest.mark.parametrize(
    "scheduled",
    [
        lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5),
        # Its state is a dict with numbers for keys, which JSON alone would make text of.
        lambda optimizer: torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[2, 4], gamma=0.5),
    ],
    ids=["step", "milestones"],
)
def test_a_user_s_optimizer_and_scheduler_resume_to_the_bit(tmp_path, scheduled, as_lr):
    def optimized(parameters):
        return torch.optim.RMSprop(parameters, lr=as_lr(0.0625), momentum=0.5)

    rates = rates_of_a_run_in_parts(tmp_path, optimized, scheduled)
    assert rates == [0.0625, 0.0625, 0.03125, 0.03125, 0.015625, 0.015625]


def test_numbers_of_optimizer_and_scheduler_that_are_tensors_resume_to_the_bit(tmp_path):
    def optimized(parameters):
        betas = torch.tensor(0.9), torch.tensor(0.999)
        return torch.optim.Adam(parameters, lr=torch.tensor(0.1), betas=betas, foreach=False)

    def scheduled(optimizer):
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))

    rates_of_a_run_in_parts(tmp_path, optimized, scheduled)


def go_on(
    run_dir: Path, steps: int, scheduled=None, before_fit=None, kind=torch.optim.SGD, **options
) -> Trainer:
    """A run to step `steps` with an optimizer of its own."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = kind(model.parameters(), **options)
    scheduler = scheduled and scheduled(optimizer)
    batches = [(torch.ones(3, 4), torch.tensor([0, 1, 1]))]
    cfg = RunConfig(device="cpu", run_dir=str(run_dir), trainer=TrainerConfig(steps=steps))
    trainer = Trainer(model, cfg, train_loader=batches, optimizer=optimizer, lr_scheduler=scheduler)
    if before_fit is not None:
        before_fit(trainer)
    trainer.fit()
    return trainer


def notes_of_options(capsys) -> list[str]:
    said = capsys.readouterr().out.splitlines()
    return [line for line in said if line.startswith("note: ") and "trainer.steps" not in line]


def stays(owner: str, given: str, before: object) -> str:
    return (
        f"note: {owner} is given {given}, the checkpoint's run began with {before}: the checkpoint's value "
        "stays, as with PyTorch's load_state_dict"
    )


def step_lr(step_size: int):
    return lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, step_size, 0.5)


def test_options_that_a_script_has_changed_and_a_resume_undoes_are_named(tmp_path, capsys):
    adam = {"kind": torch.optim.AdamW, "lr": 0.1}
    go_on(tmp_path / "adam", 1, **adam)
    go_on(tmp_path / "adam", 2, **adam, weight_decay=0.5, betas=(0.8, 0.9), amsgrad=True)
    assert notes_of_options(capsys) == [
        stays("AdamW", "amsgrad=True", False),
        stays("AdamW", "betas=[0.8, 0.9]", [0.9, 0.999]),
        stays("AdamW", "weight_decay=0.5", 0.01),
    ]
    go_on(tmp_path / "step", 3, step_lr(2), lr=0.1)
    trainer = go_on(tmp_path / "step", 4, step_lr(100), lr=0.2)
    assert notes_of_options(capsys) == [stays("SGD", "lr=0.2", 0.1), stays("StepLR", "step_size=100", 2)]
    assert trainer.optimizer.param_groups[0]["lr"] == 0.025
    for _ in range(2):  # as long as the script says otherwise
        trainer = go_on(tmp_path / "step", 5, step_lr(100), lr=0.1)
        assert notes_of_options(capsys) == [stays("StepLR", "step_size=100", 2)]
        trainer.resume()
        assert notes_of_options(capsys) == []  # once a process


def test_options_that_a_schedule_or_the_user_has_changed_since_are_no_change_of_the_script(tmp_path, capsys):
    class Halve(Callback):
        def on_step_end(self, trainer):
            trainer.optimizer.param_groups[0]["lr"] /= 2

    def one_cycle(optimizer):
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.3, total_steps=9)

    halved = {"before_fit": lambda trainer: trainer.callbacks.append(Halve()), "lr": 0.1}
    momentum = {"lr": 0.1, "momentum": 0.9}
    by_function = {"scheduled": lambda optimizer: lambda step: 0.1 / (step + 1)}
    for name, first, second in [
        ("step", {"scheduled": step_lr(1), "lr": 0.1}, {"scheduled": step_lr(1), "lr": 0.1}),
        ("removed", {"scheduled": step_lr(1), "lr": 0.1}, {"lr": 0.1}),
        ("added", momentum, {"scheduled": one_cycle, **momentum}),
        ("removed too", {"scheduled": one_cycle, **momentum}, momentum),
        ("callback", halved, halved),
        ("function", {**by_function, "lr": 0.1}, {**by_function, "lr": 0.2}),
    ]:
        go_on(tmp_path / name, 2, **first)
        go_on(tmp_path / name, 4, **second)
        assert (name, notes_of_options(capsys)) == (name, [])


def test_a_rate_set_after_resume_holds_and_needs_no_note(tmp_path, capsys):
    def lower(trainer: Trainer) -> None:
        trainer.resume()
        trainer.optimizer.param_groups[0]["lr"] = 0.01

    go_on(tmp_path, 1, lr=0.1)
    go_on(tmp_path, 2, before_fit=lower, lr=0.1)
    go_on(tmp_path, 3, lr=0.01)
    assert notes_of_options(capsys) == []
    rates = [record["learning_rate"] for record in read_jsonl(tmp_path / "metrics.jsonl")]
    assert rates == [0.1, 0.01, 0.01]


class Halves(Callback):
    def on_step_end(self, trainer: Trainer) -> None:
        trainer.optimizer.param_groups[0]["lr"].mul_(0.5)


def test_a_rate_that_is_a_tensor_goes_on_as_one(tmp_path):
    for steps in (2, 3):
        rate = torch.tensor(0.25)
        trainer = go_on(tmp_path, steps, before_fit=lambda each: each.callbacks.append(Halves()), lr=rate)
    assert torch.equal(trainer.optimizer.param_groups[0]["lr"], torch.tensor(0.25 / 8))


def test_a_checkpoint_that_does_not_say_what_was_given_loads_without_a_note(tmp_path, capsys, monkeypatch):
    with monkeypatch.context() as earlier:
        earlier.setattr(GivenOptions, "state", lambda self: None)
        go_on(tmp_path, 1, lr=0.1)
    go_on(tmp_path, 2, lr=0.01)
    go_on(tmp_path, 3, lr=0.01)
    assert notes_of_options(capsys) == []
