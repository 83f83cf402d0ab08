"""The one loop: what the judge of bad steps decides is acted on in it, and its parts stay small."""

import ast
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tputrain import Callback, CheckpointConfig, LogConfig, RunConfig, Trainer, TrainerConfig, UserError
from tputrain import trainer as trainer_file
from tputrain.loggers.jsonl import read_jsonl

ROOT = Path(__file__).resolve().parents[3]


class Batches:
    """By step; those of `bad` steps (from 1) hold a value that is not a number."""

    def __init__(self, *bad: int):
        self.bad = bad

    def batch_at(self, step: int, micro: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(step)
        inputs = torch.rand(6, 4, generator=generator)
        if step + 1 in self.bad:
            inputs[0, 0] = torch.nan
        return [inputs, torch.randint(3, (6,), generator=generator)]


class Told(Callback):
    def __init__(self) -> None:
        self.steps: list[int] = []
        self.errors: list[str] = []

    def on_step_end(self, trainer: Trainer) -> None:
        self.steps.append(trainer.step)

    def on_exception(self, trainer: Trainer, error: BaseException) -> None:
        self.errors.append(str(error))


def trainer_of(run_dir: Path | None, loader: Any, callbacks: Any = (), **settings: Any) -> Trainer:
    torch.manual_seed(0)
    cfg = RunConfig(
        device="cpu",
        run_dir=None if run_dir is None else str(run_dir),
        trainer=TrainerConfig(**{"steps": 9, **settings}),
        checkpoint=CheckpointConfig(every=2, keep_last=9),
        log=LogConfig(every=3, progress="none"),
    )
    return Trainer(nn.Linear(4, 3), cfg, train_loader=loader, callbacks=callbacks)


def test_fit_is_the_only_loop_over_steps_and_the_file_is_short():
    source = inspect.getsource(trainer_file)
    assert len(source.splitlines()) < 450
    tree = ast.parse(source)
    functions = [each for each in ast.walk(tree) if isinstance(each, ast.FunctionDef)]
    loops = [each.name for each in functions if any(isinstance(node, ast.While) for node in ast.walk(each))]
    assert loops == ["fit"]
    callers = []
    for path in (ROOT / "tputrain").rglob("*.py"):
        calls = (each for each in ast.walk(ast.parse(path.read_text())) if isinstance(each, ast.Call))
        named = [each for each in calls if getattr(each.func, "attr", "") == "train_step"]
        callers += [path.name for _ in named]
    assert sorted(callers) == ["abstract_step.py", "abstract_step.py", "trainer.py"]


def test_steps_that_are_done_again_on_the_way_to_a_bad_one_are_neither_told_nor_logged_nor_saved(tmp_path):
    told = Told()
    trainer = trainer_of(tmp_path, Batches(6), [told], evaluate_every=None)
    with pytest.raises(UserError, match=r"^step 6: loss is nan; the run stops") as caught:
        trainer.fit()
    assert told.errors == [str(caught.value)]
    assert told.steps == [1, 2, 3, 4, 5, 6]
    assert [each["step"] for each in read_jsonl(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]
    assert trainer.step == 5  # it stands before the step that was replayed
    assert trainer.store is not None
    assert trainer.store.steps() == [4, 2]


def test_a_run_goes_back_inside_its_loop_and_its_callbacks_see_the_steps_again(tmp_path):
    told = Told()
    trainer = trainer_of(tmp_path, Batches(6), [told], on_nonfinite="rollback")
    trainer.fit()
    assert told.steps == [1, 2, 3, 4, 5, 6, 5, 6, 7, 8, 9]
    assert told.errors == []
    assert [each["step"] for each in read_jsonl(tmp_path / "metrics.jsonl")] == list(range(1, 10))


def test_a_bad_state_is_not_saved_by_hand_either(tmp_path):
    class Saves(Callback):
        def on_step_end(self, trainer: Trainer) -> None:
            if trainer.step == 5:
                trainer.save()

    for policy in ("stop", "rollback"):
        trainer = trainer_of(tmp_path / policy, Batches(5), [Saves()], on_nonfinite=policy)
        with pytest.raises(UserError, match=r"^step 5: loss is nan; the run stops"):
            trainer.fit()
        assert trainer.store is not None
        assert trainer.store.steps() == [4, 2]


def test_the_watchdog_waits_for_the_steps_that_are_done_again(tmp_path):
    seen: list[float] = []

    class Waits(Callback):
        def on_step_end(self, trainer: Trainer) -> None:
            seen.append((trainer.step, trainer._watchdog._read_up_to))

    trainer_of(tmp_path, Batches(6), [Waits()], on_nonfinite="rollback").fit()
    assert seen[5:8] == [(6, 4), (5, 4), (6, 4)]  # read at 4 for its checkpoint; back there, not at 6
