"""The callbacks that a recipe can switch on: when they act, and what they leave."""

import errno
import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tputrain import CheckpointConfig, LogConfig, RunConfig, Trainer, TrainerConfig, UserError
from tputrain.callbacks.best_checkpoint import BestCheckpoint, BestCheckpointConfig
from tputrain.callbacks.callback import Callback
from tputrain.callbacks.config import CallbacksConfig, build_callbacks
from tputrain.callbacks.early_stopping import EarlyStopping, EarlyStoppingConfig
from tputrain.callbacks.monitored import Monitored
from tputrain.callbacks.profile_steps import ProfileConfig, ProfileSteps
from tputrain.callbacks.time_limit import TimeLimit, TimeLimitConfig
from tputrain.checkpoint.store import CheckpointStore
from tputrain.loggers.jsonl import read_jsonl
from tputrain.signals import Interrupted


def samples(count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, 4, generator=generator), torch.randint(3, (count,), generator=generator)


def trainer_with_scores(
    scores: list[float], run_dir: Path | None, *callbacks: Callback, **changes
) -> Trainer:
    """A trainer that evaluates after every step, to the score of that step; it ends with the last of them."""
    trainer: Trainer

    def score(output: Tensor, target: Tensor) -> Tensor:
        return torch.tensor(scores[trainer.step], device=output.device)

    settings = {
        "device": "cpu",
        "run_dir": None if run_dir is None else str(run_dir),
        "trainer": TrainerConfig(steps=len(scores) - 1, evaluate_every=1),
        "checkpoint": CheckpointConfig(every=None, keep_last=1),
        "log": LogConfig(every=2, progress="none"),
    }
    torch.manual_seed(0)
    trainer = Trainer(
        nn.Linear(4, 3),
        RunConfig(**(settings | changes)),
        train_loader=[samples(4)],
        val_loader=[samples(4)],
        metrics={"score": score},
        callbacks=callbacks,
    )
    return trainer


def checkpoints(run_dir: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in (run_dir / "checkpoints").glob("step-*"))


@pytest.mark.parametrize(
    ("mode", "value", "best", "is_better"),
    [
        ("min", 1.0, None, True),
        ("min", 1.0, 1.05, False),
        ("min", 1.0, 1.2, True),
        ("max", 1.0, 0.95, False),
        ("max", 1.0, 0.8, True),
        ("max", float("nan"), None, False),
        ("min", float("-inf"), 1.0, False),
    ],
)
def test_better_is_by_more_than_min_delta_and_never_what_is_not_finite(mode, value, best, is_better):
    assert Monitored("key", "score", mode, min_delta=0.1).is_better(value, best) is is_better


def test_early_stopping_waits_for_patience_evaluations_without_a_better_one(capsys):
    scores = [0.0, 1.0, 0.5, 2.0, 1.5, 1.9, 9.0, 9.0]
    trainer = trainer_with_scores(scores, None, EarlyStopping(2, "score", "max"))
    trainer.fit()
    assert trainer.step == 5
    said = capsys.readouterr().out
    assert "stopped early at step 5: 2 evaluations without a better score (the best was 2.0000)" in said


@pytest.mark.parametrize("first", [float("nan"), float("inf"), float("-inf")])
def test_a_first_evaluation_that_is_no_number_is_never_the_best(tmp_path, first):
    best, stopping = BestCheckpoint("score"), EarlyStopping(9, "score")
    going_on = TrainerConfig(steps=3, evaluate_every=1, on_nonfinite="skip")
    trainer = trainer_with_scores([first, first, 3.0, 4.0], tmp_path, best, stopping, trainer=going_on)
    measure = trainer._evaluator.measure
    trainer._evaluator.measure = lambda: (result := measure()) | {"loss": result["score"]}
    trainer.fit()
    assert trainer.best == {"step": 2, "loss": 3.0}
    assert (best.best, best.step, stopping.best) == (3.0, 2, 3.0)
    for step in (2, 3):
        text = (tmp_path / "checkpoints" / f"step-{step}" / "state.json").read_text()
        assert json.loads(text, parse_constant=pytest.fail)["best"] == {"step": 2, "loss": 3.0}


def test_a_run_that_was_stopped_early_stays_stopped_until_patience_is_raised(tmp_path):
    scores = [0.0, 1.0, 0.9, 0.8, 0.7, 2.0, 3.0]
    for patience, last in ((2, 3), (2, 3), (3, 4), (4, 6)):
        trainer = trainer_with_scores(scores, tmp_path, EarlyStopping(patience, "score", "max"))
        trainer.fit()
        assert trainer.step == last
    assert [record["step"] for record in read_jsonl(tmp_path / "evaluations.jsonl")] == list(range(7))


def test_the_best_checkpoint_is_kept_while_others_go_and_a_link_leads_to_it(tmp_path):
    scores = [0.1, 3.0, 2.0, 1.0, 1.5, 2.5, 0.4, 0.6, 0.7]
    callback = BestCheckpoint("score", "min")
    trainer_with_scores(scores[:6], tmp_path, callback).fit()
    assert (callback.step, callback.best) == (
        3,
        1.0,
    )  # what was evaluated before the first step is not counted
    assert checkpoints(tmp_path) == [3, 5]
    assert (tmp_path / "checkpoints" / "best").resolve().name == "step-3"

    resumed = BestCheckpoint("score", "min")
    trainer_with_scores(scores, tmp_path, resumed).fit()
    assert resumed.step == 6
    assert checkpoints(tmp_path) == [6, 8]
    best = tmp_path / "checkpoints" / "best"
    assert json.loads((best / "state.json").read_text())["step"] == 6


def test_the_best_checkpoint_outlives_a_resume_that_finds_nothing_better(tmp_path):
    scores = [9.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    trainer_with_scores(scores[:3], tmp_path, BestCheckpoint("score")).fit()
    trainer_with_scores(scores, tmp_path, BestCheckpoint("score")).fit()
    assert checkpoints(tmp_path) == [1, 5]


def link_of(run_dir: Path, name: str) -> str:
    return (run_dir / "checkpoints" / name).resolve().name


def test_two_best_checkpoints_are_kept_each_by_its_own_callback(tmp_path):
    scores = [0.0, 3.0, 1.0, 9.0, 2.0, 4.0]
    least, most = BestCheckpoint("score", "min"), BestCheckpoint("score", "max")
    trainer_with_scores(scores, tmp_path, least, most).fit()
    assert (least.step, most.step) == (2, 3)
    assert checkpoints(tmp_path) == [2, 3, 5]
    assert (link_of(tmp_path, "best"), link_of(tmp_path, "best-score")) == ("step-2", "step-3")

    least, most = BestCheckpoint("score", "min"), BestCheckpoint("score", "max")
    trainer_with_scores([*scores, 0.5, 5.0], tmp_path, least, most).fit()
    assert checkpoints(tmp_path) == [3, 6, 7]
    assert (link_of(tmp_path, "best"), link_of(tmp_path, "best-score")) == ("step-6", "step-3")


@pytest.mark.parametrize("background", [True, False])
def test_a_new_best_that_cannot_be_written_does_not_cost_the_old_one(tmp_path, monkeypatch, background):
    write = CheckpointStore.write

    def fail_at_four(store, step, fill, *more):
        def full(directory: Path) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        return write(store, step, full if step == 4 else fill, *more)

    monkeypatch.setattr(CheckpointStore, "write", fail_at_four)
    scores = [0.0, 5.0, 2.0, 3.0, 1.0, 4.0, 1.5, 6.0, 7.0]
    callback = BestCheckpoint("score")
    saving = CheckpointConfig(every=1, keep_last=1, background=background)
    trainer = trainer_with_scores(scores, tmp_path, callback, checkpoint=saving)
    links: list[str] = []
    trainer.callbacks.append(remembers := Callback())
    remembers.on_save = lambda trainer, checkpoint: links.append(link_of(tmp_path, "best"))
    trainer.fit()
    assert links[:4] == ["step-1", "step-2", "step-2", "step-2"]  # of steps 1, 2, 3 and 5
    assert (callback.step, callback.best) == (6, 1.5)  # better than what is saved, if not than what was lost
    assert checkpoints(tmp_path) == [6, 8]
    assert link_of(tmp_path, "best") == "step-6"


def test_on_a_new_branch_the_best_is_that_of_the_branch(tmp_path, capsys):
    scores = [0.0, 5.0, 4.0, 3.0, 2.0, 1.0, 6.0, 6.0]
    saving = CheckpointConfig(every=1, keep_last=9)
    trainer_with_scores(scores, tmp_path, BestCheckpoint("score"), checkpoint=saving).fit()
    assert link_of(tmp_path, "best") == "step-5"
    callback = BestCheckpoint("score")
    trainer = trainer_with_scores([9.0, 9.0, 9.0, 9.0, 7.0, 2.5], tmp_path, callback, checkpoint=saving)
    trainer.resume(tmp_path / "checkpoints" / "step-3")
    trainer.fit()
    assert (callback.step, link_of(tmp_path, "best")) == (5, "step-5")
    assert (tmp_path / "checkpoints" / "abandoned-step-5-1").is_dir()


def test_a_best_whose_checkpoint_is_gone_is_none_to_be_better_than(tmp_path, capsys):
    scores = [0.0, 5.0, 1.0, 6.0, 6.0, 3.0]
    trainer_with_scores(scores[:4], tmp_path, BestCheckpoint("score")).fit()
    shutil.rmtree(tmp_path / "checkpoints" / "step-2")
    callback = BestCheckpoint("score")
    trainer_with_scores(scores, tmp_path, callback).fit()
    assert "note: no checkpoint of step 2, the best by score: it counts no more" in capsys.readouterr().out
    assert (callback.step, link_of(tmp_path, "best")) == (5, "step-5")


class TerminatedAt(Callback):
    """SIGTERM in a step that an evaluation is due after: it is made after the resume."""

    def __init__(self, step: int):
        self.step = step

    def on_step_end(self, trainer: Trainer) -> None:
        if trainer.step == self.step:
            os.kill(os.getpid(), signal.SIGTERM)


def test_an_evaluation_made_after_a_resume_is_saved_as_its_own_step(tmp_path):
    scores = [9.0, 5.0, 1.0, 2.0, 3.0]
    with pytest.raises(Interrupted):
        trainer_with_scores(scores, tmp_path, BestCheckpoint("score"), TerminatedAt(2)).fit()
    callback = BestCheckpoint("score")
    trainer_with_scores(scores, tmp_path, callback).fit()
    assert callback.step == 2
    assert checkpoints(tmp_path) == [2, 4]
    assert [record["step"] for record in read_jsonl(tmp_path / "evaluations.jsonl")] == [0, 1, 2, 3, 4]


def test_checkpoints_at_multiples_of_keep_every_are_never_removed(tmp_path):
    saving = CheckpointConfig(every=1, keep_last=2, keep_every=3)
    trainer_with_scores([0.0] * 9, tmp_path, checkpoint=saving).fit()
    assert checkpoints(tmp_path) == [3, 6, 7, 8]


def test_a_time_limit_ends_the_run_with_a_checkpoint_and_counts_anew_in_the_next(tmp_path, capsys):
    clock = iter(range(0, 100_000, 60))  # a minute passes whenever it is asked
    for last in (3, 6):
        trainer = trainer_with_scores([0.0] * 9, tmp_path, TimeLimit(3.0, clock=lambda: float(next(clock))))
        trainer.fit()
        assert trainer.step == last
        assert checkpoints(tmp_path) == [last]
    assert "time limit: step 6 ended after 3.0 minutes" in capsys.readouterr().out


@pytest.mark.parametrize("device", ["cpu", "tpu"])
def test_the_profile_holds_the_steps_that_were_asked_for(tmp_path, device):
    callback = ProfileSteps(active=2, wait=2, warmup=1, repeat=1)
    trainer_with_scores([0.0] * 8, tmp_path, callback, device=device).fit()
    (trace,) = (tmp_path / "profile").iterdir()
    assert trace.name == "step-5.json"
    events = json.loads(trace.read_text())["traceEvents"]
    steps = sorted({event["name"] for event in events if str(event.get("name")).startswith("ProfilerStep")})
    assert steps == ["ProfilerStep#3", "ProfilerStep#4"]
    assert any(event["name"] == "aten::linear" for event in events)


def test_a_profile_that_the_disk_does_not_take_ends_no_run(tmp_path, capfd):
    (tmp_path / "profile").write_text("in the way")
    assert trainer_with_scores([0.0] * 4, tmp_path, ProfileSteps(active=1, wait=0)).fit() is None
    assert "the profile cannot be written (File exists); training goes on" in capfd.readouterr().err


def test_a_profiler_is_switched_off_when_a_run_fails(tmp_path):
    class Fails(Callback):
        def on_step_end(self, trainer: Trainer) -> None:
            raise RuntimeError("this run fails")

    with pytest.raises(RuntimeError, match="this run fails"):
        trainer_with_scores([0.0] * 4, tmp_path, ProfileSteps(active=1, wait=0), Fails()).fit()
    assert not torch.autograd.profiler._is_profiler_enabled


def test_callbacks_are_off_by_default_and_switched_on_by_the_first_of_their_keys():
    assert build_callbacks(CallbacksConfig()) == []
    cfg = CallbacksConfig(
        early_stopping=EarlyStoppingConfig(patience=3, metric="accuracy", mode="max", min_delta=0.5),
        best_checkpoint=BestCheckpointConfig(metric="accuracy", mode="max"),
        time_limit=TimeLimitConfig(minutes=5.0),
        profile=ProfileConfig(active=2, wait=3, warmup=4, repeat=5),
    )
    built = build_callbacks(cfg)
    assert [type(callback) for callback in built] == [EarlyStopping, BestCheckpoint, TimeLimit, ProfileSteps]
    assert [callback.cfg for callback in built] == [
        cfg.early_stopping,
        cfg.best_checkpoint,
        cfg.time_limit,
        cfg.profile,
    ]


def test_the_trainer_runs_the_callbacks_of_its_configuration(tmp_path):
    callbacks = CallbacksConfig(
        early_stopping=EarlyStoppingConfig(patience=1, metric="score"),
        best_checkpoint=BestCheckpointConfig(metric="score"),
    )
    trainer = trainer_with_scores([9.0, 1.0, 2.0, 3.0], tmp_path, callbacks=callbacks)
    trainer.fit()
    assert trainer.step == 2
    assert checkpoints(tmp_path) == [1, 2]


@pytest.mark.parametrize(
    ("callback", "message"),
    [
        (
            EarlyStopping(2, "scor"),
            "callbacks.early_stopping.metric=scor: evaluations have loss, score; did you",
        ),
        (BestCheckpoint("zz"), "callbacks.best_checkpoint.metric=zz: evaluations have loss, score$"),
    ],
)
def test_a_metric_that_evaluations_lack_is_one_line_naming_those_they_have(tmp_path, callback, message):
    with pytest.raises(UserError, match=message):
        trainer_with_scores([0.0, 0.0], tmp_path, callback).fit()


@pytest.mark.parametrize("callback", [EarlyStopping(2), BestCheckpoint()])
def test_watching_evaluations_that_never_come_is_a_mistake(tmp_path, callback):
    cfg = RunConfig(device="cpu", run_dir=str(tmp_path), log=LogConfig(progress="none"))
    with pytest.raises(UserError, match=r"metric=loss: the Trainer has no val_loader"):
        Trainer(nn.Linear(4, 3), cfg, train_loader=[samples(4)], callbacks=[callback]).fit()


@pytest.mark.parametrize("callback", [BestCheckpoint(), ProfileSteps(1)])
def test_writing_without_a_run_directory_is_a_mistake(callback):
    with pytest.raises(UserError, match="no run_dir was given, so there is nowhere to"):
        trainer_with_scores([0.0, 0.0], None, callback).fit()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: EarlyStoppingConfig(patience=0), "callbacks.early_stopping.patience=0: expected 1 or more"),
        (
            lambda: EarlyStoppingConfig(mode="mix"),
            "callbacks.early_stopping.mode=mix: expected one of min, max",
        ),
        (
            lambda: BestCheckpointConfig(mode="low"),
            "callbacks.best_checkpoint.mode=low: expected one of min, max",
        ),
        (lambda: TimeLimitConfig(minutes=0.0), "callbacks.time_limit.minutes=0.0: expected a number above 0"),
        (lambda: ProfileConfig(active=0), "callbacks.profile.active=0: expected 1 or more"),
        (
            lambda: CheckpointConfig(every=100, keep_every=150),
            "checkpoint.keep_every=150: expected a multiple of checkpoint.every=100",
        ),
    ],
)
def test_settings_that_cannot_be_meant_are_one_line(make, message):
    with pytest.raises(UserError, match=message):
        make()
