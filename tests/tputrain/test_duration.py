"""Runs as long as people write it: epochs, tokens, samples, time."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.tputrain.kept_records import KeptRecords
from tests.tputrain.tiny_run import RECIPE
from tputrain import (
    Callback,
    CheckpointConfig,
    LogConfig,
    RunConfig,
    ScheduleConfig,
    Trainer,
    TrainerConfig,
    UserError,
)
from tputrain.cli import main
from tputrain.duration import Duration
from tputrain.loggers.jsonl import read_jsonl


@pytest.mark.parametrize(
    ("text", "amount", "unit"),
    [
        ("500", 500, "steps"),
        ("10k steps", 10_000, "steps"),
        ("2ep", 2, "epochs"),
        ("0.5 epochs", 0.5, "epochs"),
        ("1B tokens", 1e9, "tokens"),
        ("1.5M tok", 1.5e6, "tokens"),
        ("1e9tokens", 1e9, "tokens"),
        ("20,000 samples", 20_000, "samples"),
        ("30min", 1800, "seconds"),
        ("2 h", 7200, "seconds"),
    ],
)
def test_a_duration_is_read_as_it_is_written(text, amount, unit):
    duration = Duration.of(text)
    assert (duration.amount, duration.unit) == (amount, unit)
    key, _, twice = duration.doubled.partition("=")
    assert key == "trainer.duration"
    assert (Duration.of(twice).amount, Duration.of(twice).unit) == (2 * amount, unit)


@pytest.mark.parametrize("text", ["", "many", "2 fortnights", "-3ep", "0 steps", "1x tokens"])
def test_what_is_no_duration_is_refused(text):
    with pytest.raises(UserError, match=r"^trainer.duration=.*: expected a number and a unit, such as"):
        TrainerConfig(duration=text)


def samples(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(count, 4, generator=generator), torch.randint(3, (count,), generator=generator)]


class Batches:
    """By step, 6 samples each; 3 steps are an epoch."""

    def batch_at(self, step: int, micro: int) -> list[Tensor]:
        return [each[6 * (step % 3) :][:6] for each in samples(18)]

    def epochs_at(self, step: int) -> float:
        return step / 3


def fit(loader: Any, run_dir: Any = None, model: Any = None, **settings: Any) -> tuple[Trainer, KeptRecords]:
    torch.manual_seed(0)
    schedule = settings.pop("schedule", ScheduleConfig())
    callbacks = settings.pop("callbacks", ())
    every = settings.pop("every", 2)
    cfg = RunConfig(
        device="cpu",
        run_dir=None if run_dir is None else str(run_dir),
        trainer=TrainerConfig(**settings),
        schedule=schedule,
        checkpoint=CheckpointConfig(every=every, keep_last=9),
        log=LogConfig(every=10, progress="none"),
    )
    records = KeptRecords()
    trainer = Trainer(
        model or nn.Linear(4, 3), cfg, train_loader=loader, loggers=[records], callbacks=callbacks
    )
    trainer.fit()
    return trainer, records


def shuffled() -> DataLoader:
    return DataLoader(TensorDataset(*samples(18)), batch_size=6, shuffle=True)


@pytest.mark.parametrize(
    ("make", "duration", "steps"),
    [
        (Batches, "2ep", 6),
        (Batches, "36 samples", 6),
        (Batches, "34 samples", 6),
        (shuffled, "2ep", 6),
        (shuffled, "1.5ep", 5),
        (lambda: [samples(4), samples(8)], "25 samples", 5),
    ],
)
def test_a_run_by_duration_is_the_run_of_as_many_steps(make, duration, steps, tmp_path):
    """To the bit, with the learning rates of its schedule, and also where it was interrupted."""
    trainer, records = fit(make(), tmp_path / "whole", duration=duration)
    assert trainer.step == steps
    if duration != "25 samples":  # batches of one size
        _, expected = fit(make(), steps=steps)
        for key in ("loss_hex", "learning_rate"):
            assert [each[key] for each in records.steps] == [each[key] for each in expected.steps]

    class Stops(Callback):
        def on_step_end(self, trainer):
            trainer.control.stop = trainer.step == 3

    fit(make(), tmp_path / "parts", duration=duration, callbacks=[Stops()])
    resumed, _ = fit(make(), tmp_path / "parts", duration=duration)
    assert resumed.step == steps
    logged = read_jsonl(tmp_path / "parts" / "metrics.jsonl")
    assert [each["loss_hex"] for each in logged] == [each["loss_hex"] for each in records.steps]
    again, none = fit(make(), tmp_path / "parts", duration=duration)
    assert (again.step, none.steps) == (steps, [])


def test_a_run_by_time_ends_in_time_and_goes_on_from_what_it_has_used(tmp_path, monkeypatch):
    seconds = 0.0

    class Takes(Callback):
        def on_step_start(self, trainer):
            nonlocal seconds
            seconds += 20.0

    monkeypatch.setattr("tputrain.loop.position.time.monotonic", lambda: seconds)
    constant = ScheduleConfig(name="constant")
    more = {"duration": "2min", "schedule": constant, "callbacks": [Takes()]}
    trainer, _ = fit(Batches(), tmp_path, **more)
    assert (trainer.step, trainer.seconds) == (6, 120.0)
    again, _ = fit(Batches(), tmp_path, **more)
    assert again.step == 6
    longer, _ = fit(Batches(), tmp_path, **(more | {"duration": "160 s"}))
    assert (longer.step, longer.seconds) == (8, 160.0)
    with pytest.raises(UserError, match=r"^trainer.duration=2min: expected schedule.name=constant, or"):
        fit(Batches(), duration="2min")


def test_checkpoints_by_time_and_a_resumed_run_counts_on(tmp_path):
    """Every 50 minutes of steps of 20, and at the end; what came after the last checkpoint is done again."""
    has_failed = False

    class Takes(Callback):
        def on_step_start(self, trainer):
            trainer.seconds += 20 * 60.0

        def on_step_end(self, trainer):
            nonlocal has_failed
            if trainer.step == 8 and not has_failed:
                has_failed = True
                raise RuntimeError

    more = {"steps": 10, "every": "50 min", "callbacks": [Takes()]}
    with pytest.raises(RuntimeError):
        fit(Batches(), tmp_path, **more)
    assert {each.name for each in (tmp_path / "checkpoints").iterdir()} == {"step-3", "step-6"}
    trainer, _ = fit(Batches(), tmp_path, **more)
    assert sorted(trainer.store.steps()) == [3, 6, 9, 10]
    _, records = fit(Batches(), tmp_path / "by_steps", steps=10)
    logged = read_jsonl(tmp_path / "metrics.jsonl")
    assert [each["loss_hex"] for each in logged] == [each["loss_hex"] for each in records.steps]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"every": "2ep"}, "checkpoint.every=2ep: expected a number of steps such as 100, or a time"),
        ({"every": "often"}, "checkpoint.every=often: expected a number of steps such as 100, or a time"),
        ({"every": 0}, "checkpoint.every=0: expected 1 or more"),
        ({"every": "1h", "keep_every": 9}, "checkpoint.keep_every=9: expected null with checkpoint.every=1h"),
    ],
)
def test_what_is_no_time_between_checkpoints_is_refused(settings, message):
    with pytest.raises(UserError, match=f"^{message}"):
        CheckpointConfig(**settings)


def test_units_that_the_data_does_not_have_are_refused():
    with pytest.raises(UserError, match=r"^trainer.duration=1k tokens: this data is counted in samples"):
        fit(Batches(), duration="1k tokens")
    with pytest.raises(UserError, match=r"^trainer.duration=1ep: the length of this train_loader is"):
        fit((samples(6) for _ in range(9)), duration="1ep")


def test_a_recipe_takes_a_duration_in_tokens(tmp_path, monkeypatch, capsys):
    (tmp_path / "tiny.yaml").write_text(RECIPE)
    (tmp_path / "text.txt").write_text("def add(first, second):\n    return first + second\n" * 100)
    monkeypatch.chdir(tmp_path)
    assert main(["run", "tiny.yaml", "trainer.duration=640 tokens"]) == 0
    assert read_jsonl(tmp_path / "runs/tiny/metrics.jsonl")[-1]["step"] == 5  # of 128 tokens
    said = capsys.readouterr().out
    assert "run: 640 tokens, in" in said
    assert "step 1/5  loss" in said  # the first step shows how many there will be
    assert main(["run", "tiny.yaml", "trainer.duration=640 tokens"]) == 0
    said = capsys.readouterr().out
    assert "is finished: it has done its 5 steps" in said
    assert "'trainer.duration=1280 tokens'" in said
    assert main(["run", "tiny.yaml", "trainer.duration=2ep"]) == 0
    assert read_jsonl(tmp_path / "runs/tiny/metrics.jsonl")[-1]["step"] > 5
