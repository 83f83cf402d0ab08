"""A run that goes on from an older checkpoint: that branch is the run from there on, and nothing is lost."""

import errno
import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import fsspec
import pytest

from tests.tputrain.resumable_run import STEPS, build
from tputrain import CheckpointConfig, Trainer, TrainerConfig, UserError
from tputrain.callbacks.callback import Callback
from tputrain.checkpoint import integrity, store
from tputrain.checkpoint.integrity import verify
from tputrain.checkpoint.store import CheckpointStore
from tputrain.loggers.jsonl import read_jsonl


class Another(Callback):
    """Makes the branch another one: from here on the learning rate is halved."""

    def on_fit_start(self, trainer: Trainer) -> None:
        trainer._rates.is_by_config = False
        for group in trainer.optimizer.param_groups:
            group["lr"] = 0.015


def names(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def losses(run_dir: Path) -> dict[int, str]:
    records = read_jsonl(run_dir / "metrics.jsonl")
    assert [record["step"] for record in records] == list(range(1, len(records) + 1))
    return {record["step"]: record["loss_hex"] for record in records}


@pytest.fixture
def finished(tmp_path) -> Path:
    run_dir = tmp_path / "run"
    build(run_dir, checkpoint=CheckpointConfig(every=3, keep_last=9)).fit()
    return run_dir


def branch(run_dir: Path, step: int, **changes) -> Trainer:
    """A trainer that goes on from the checkpoint of `step`, by its path."""
    trainer = build(run_dir, **({"checkpoint": CheckpointConfig(every=3, keep_last=2)} | changes))
    trainer.callbacks.append(Another())
    trainer.resume(run_dir / "checkpoints" / f"step-{step}")
    return trainer


def test_what_is_saved_on_a_new_branch_is_kept_and_gone_on_from(finished, capsys):
    before = losses(finished)
    ninth = (finished / "checkpoints" / "step-9" / "model.safetensors").read_bytes()
    branch(
        finished, 6, trainer=TrainerConfig(steps=10, accumulate=2, evaluate_every=4, max_grad_norm=0.5)
    ).fit()
    said = capsys.readouterr().out
    assert "the run goes on from step 6: what was saved after it is set aside in" in said
    assert "as abandoned-step-9-1, abandoned-step-12-1, abandoned-step-14-1; remove that when" in said
    aside = ["abandoned-step-12-1", "abandoned-step-14-1", "abandoned-step-9-1"]
    assert names(finished) == [*aside, "step-10", "step-9"]
    for name in aside:
        verify(finished / "checkpoints" / name)
    assert (finished / "checkpoints" / "abandoned-step-9-1" / "model.safetensors").read_bytes() == ninth
    assert (finished / "checkpoints" / "step-9" / "model.safetensors").read_bytes() != ninth
    now = losses(finished)
    assert len(now) == 10
    assert [now[step] == before[step] for step in range(1, 11)] == [True] * 7 + [False] * 3
    evaluated = [record["step"] for record in read_jsonl(finished / "evaluations.jsonl")]
    assert evaluated == [0, 4, 8, 10]

    build(finished, checkpoint=CheckpointConfig(every=3, keep_last=2)).fit()
    assert "step-10 at step 10" in capsys.readouterr().out
    assert list(losses(finished)) == list(range(1, STEPS + 1))
    assert [losses(finished)[step] for step in now] == list(now.values())
    assert names(finished) == [*aside, "step-12", "step-14"]


def test_where_the_later_ones_were_deleted_by_hand_the_rest_goes_on_too(finished):
    for step in (9, 12, 14):
        shutil.rmtree(finished / "checkpoints" / f"step-{step}")
    build(finished, checkpoint=CheckpointConfig(every=3, keep_last=2)).fit()
    assert names(finished) == ["step-12", "step-14"]
    assert len(losses(finished)) == STEPS


def test_a_branch_whose_process_ends_before_its_first_save_is_still_the_one_that_goes_on(finished, capsys):
    class Dies(Callback):
        def on_step_end(self, trainer: Trainer) -> None:
            raise Killed

    trainer = branch(finished, 6)
    trainer.callbacks.append(Dies())
    with pytest.raises(Killed):
        trainer.fit()
    capsys.readouterr()
    build(finished).fit()
    assert "step-6 at step 6" in capsys.readouterr().out


def test_an_abandoned_branch_can_be_gone_on_from_again(finished, capsys):
    branch(finished, 6, trainer=TrainerConfig(steps=10, accumulate=2)).fit()
    trainer = build(finished, checkpoint=CheckpointConfig(every=3, keep_last=2))
    trainer.resume(finished / "checkpoints" / "abandoned-step-12-1")
    trainer.callbacks.append(died := Dies())
    with pytest.raises(Killed):
        trainer.fit()
    assert died.step == 13
    build(finished).fit()  # from what the killed process saved when it began: a checkpoint of its own
    assert "step-12 at step 12" in capsys.readouterr().out


class Dies(Callback):
    step = 0

    def on_step_end(self, trainer: Trainer) -> None:
        self.step = trainer.step
        trainer._writer.wait()
        raise Killed


def test_what_a_killed_process_left_unsealed_is_finished_before_it_is_set_aside(finished):
    checkpoints = finished / "checkpoints"
    (checkpoints / "step-14").rename(checkpoints / ".unfinished-step-14")
    branch(finished, 6, trainer=TrainerConfig(steps=7, accumulate=2)).fit()
    verify(checkpoints / "abandoned-step-14-1")


@pytest.mark.parametrize("where", ["memory", "file"])
def test_the_mirror_follows_the_branch(tmp_path, where):
    fsspec.filesystem("memory").store.clear()
    url = f"memory://{tmp_path.name}" if where == "memory" else f"file://{tmp_path}/mirror"
    mirrored = CheckpointConfig(every=3, keep_last=9, mirror=url)
    build(tmp_path / "run", checkpoint=mirrored).fit()
    trainer = branch(tmp_path / "run", 6, checkpoint=mirrored, trainer=TrainerConfig(steps=10, accumulate=2))
    trainer.fit()
    assert trainer.store.mirror.steps() == [10, 9, 6, 3]
    mirror = trainer.store.mirror
    assert mirror.filesystem.exists(f"{mirror.root}/checkpoints/abandoned-step-14-1/COMPLETE")
    elsewhere = CheckpointStore.of_run(tmp_path / "other", mirrored)
    assert elsewhere.newest(lambda *_: None).name == "step-10"


class Killed(BaseException):
    """Stands for a SIGKILL: nothing may act on it."""


_POINTS: list[tuple[object, str]] = [
    (os, "rename"),
    (os, "fsync"),
    (Path, "rename"),
    (Path, "unlink"),
    (Path, "mkdir"),
    (store.shutil, "rmtree"),
    (store, "mark_written"),
    (integrity, "_write_synced"),
]
"""Whatever changes the directory."""


@contextmanager
def fault(
    monkeypatch: pytest.MonkeyPatch, number: int, raised: Callable[[], BaseException], lasts: bool
) -> Iterator[list[str]]:
    """Raise in place of change `number` (from 0), and, if it `lasts`, of each after it; gives all changes."""
    calls: list[str] = []

    def faulty(name: str, original: Callable) -> Callable:
        def call(*arguments, **options):
            calls.append(name)
            if len(calls) == number + 1 or (lasts and len(calls) > number):
                raise raised()
            return original(*arguments, **options)

        return call

    with monkeypatch.context() as patched:
        for owner, name in _POINTS:
            patched.setattr(owner, name, faulty(name, getattr(owner, name)))
        yield calls


def fill(text: str) -> Callable[[Path], None]:
    def write(directory: Path) -> None:
        (directory / "state.json").write_text(text)

    return write


def content(checkpoint: Path) -> str:
    verify(checkpoint)
    return (checkpoint / "state.json").read_text()


def refused(path: Path, reason: str, used: Path) -> None:
    raise AssertionError(f"{path}: {reason}")


CHANGES = {
    "a new step": (lambda store: store.write(9, fill("new")), {"step-6", "new"}),
    "the same step": (lambda store: store.write(6, fill("new")), {"step-6", "new"}),
    "an older step": (lambda store: store.write(4, fill("new")), {"step-6", "new"}),
    "a branch": (lambda store: store.abandon_later(2), {"step-6", "step-2"}),
}


def disk_error() -> OSError:
    return OSError(errno.EIO, "Input/output error")


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(
    ("raised", "lasts"),
    [(Killed, True), (disk_error, True), (disk_error, False)],
    ids=["kill", "broken disk", "disk error"],
)
def test_wherever_a_change_is_cut_short_the_run_goes_on_from_before_or_after_it(
    tmp_path, monkeypatch, change, raised, lasts
):
    make, allowed = CHANGES[change]
    for step in (2, 3, 6):
        CheckpointStore(tmp_path / "before", keep_last=9).write(step, fill(f"step-{step}"))
    seen = set()
    for number in itertools.count():
        directory = shutil.copytree(tmp_path / "before", tmp_path / str(number))
        changed = CheckpointStore(directory, keep_last=1)
        with fault(monkeypatch, number, raised, lasts) as calls, suppress(Killed, OSError, UserError):
            make(changed)
        if raised is disk_error:  # the process lives on, and may go back
            changed.recover()
            assert content(changed.newest(refused)) in allowed, (number, calls)
        following = CheckpointStore(directory)
        following.take_over()
        seen.add(content(following.newest(refused)))
        assert seen <= allowed, (number, calls)
        following.write(10, fill("later"))
        assert content(following.newest(refused)) == "later"
        assert not list(directory.glob(".*"))
        if len(calls) <= number:
            break
    assert number > 3
    assert seen == allowed


def test_save_beside_a_run_that_trains_is_refused_and_touches_nothing(tmp_path):
    class Beside(Callback):
        def on_step_end(self, trainer: Trainer) -> None:
            if trainer.step != 4:
                return
            trainer._writer.wait()
            unfinished = tmp_path / "checkpoints" / ".unfinished-step-4"
            unfinished.mkdir()
            with pytest.raises(UserError, match=r"another process \(pid \d+\) is training here"):
                build(tmp_path).save()
            assert build(tmp_path).resume()
            assert unfinished.is_dir()

    trainer = build(tmp_path, trainer=TrainerConfig(steps=5, accumulate=2))
    trainer.callbacks.append(Beside())
    trainer.fit()


def test_save_of_a_trainer_that_knows_nothing_of_the_run_is_refused(finished):
    before = names(finished)
    with pytest.raises(
        UserError, match=r"save: .* this Trainer has loaded none of them: call resume\(\) first"
    ):
        build(finished).save()
    assert names(finished) == before
    trainer = build(finished)
    trainer.resume(finished / "checkpoints" / "step-6")
    assert trainer.save() == finished / "checkpoints" / "step-6"
    assert build(finished).store.steps() == [6, 3]
