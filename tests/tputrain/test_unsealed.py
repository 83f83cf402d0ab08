"""Once its files are written, a checkpoint outlives its process: the next one finishes it."""

import json
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest

from tests.tputrain.resumable_run import build
from tests.tputrain.test_resume import run_until_signal
from tputrain import UserError
from tputrain.callbacks.callback import Callback
from tputrain.checkpoint.integrity import verify
from tputrain.checkpoint.store import CheckpointStore
from tputrain.checkpoint.unsealed import WRITTEN, is_written, mark_written
from tputrain.snapshot import background
from tputrain.trainer import Trainer


@pytest.fixture
def written(tmp_path: Path) -> Path:
    directory = tmp_path / "checkpoints" / ".unfinished-step-6"
    directory.mkdir(parents=True)
    (directory / "long").write_bytes(bytes(range(256)) * 9)
    (directory / "short").write_bytes(b"\x00\x00\x01")
    (directory / "empty").touch()
    mark_written(directory)
    return directory


class Killed(BaseException):
    """Stands for a SIGKILL: nothing in the store may act on it."""


def test_it_is_finished_and_then_like_any_other(written, capsys):
    store = CheckpointStore(written.parent)
    store.take_over()
    assert [path.name for path in written.parent.iterdir()] == ["step-6"]
    verify(store.path(6))
    assert not (store.path(6) / WRITTEN).exists()
    assert "step-6, which the process before was killed at" in capsys.readouterr().out


def test_none_is_removed_for_it_since_it_is_not_known_yet_which_are_kept(written):
    store = CheckpointStore(written.parent, keep_last=1)
    written.rename(aside := written.parents[1] / "aside")
    for step in (2, 4):
        CheckpointStore(written.parent, keep_last=9).write(step, lambda path: (path / "state.json").touch())
    aside.rename(written)
    store.take_over()
    assert store.steps() == [6, 4, 2]


@pytest.mark.parametrize("name", ["long", "short", "empty"])
def test_what_is_not_what_was_written_is_not_finished(written, name):
    file = written / name
    whole = file.read_bytes()
    damages: list[bytes | None] = [None, whole + b"\0", whole[:-1] or b"x"]
    damages += [whole[:k] + bytes([whole[k] ^ 64]) + whole[k + 1 :] for k in {0, len(whole) // 2} if whole]
    for content in damages:
        file.unlink() if content is None else file.write_bytes(content)
        assert not is_written(written)
        file.write_bytes(whole)
    assert is_written(written)
    file.unlink()
    store = CheckpointStore(written.parent)
    store.take_over()
    assert store.steps() == []


def test_nor_is_one_without_its_mark_or_of_before_the_machine_started(written):
    mark = (written / WRITTEN).read_text()
    for content in ("", mark[:-1], json.dumps(json.loads(mark) | {"boot": "another"})):
        (written / WRITTEN).write_text(content)
        assert not is_written(written)
    (written / WRITTEN).unlink()
    assert not is_written(written)


@pytest.mark.parametrize("after", ["checksums.json", "COMPLETE"])
def test_killed_while_it_is_sealed_it_is_sealed_again(written, monkeypatch, after):
    with monkeypatch.context() as dying:
        dying.setattr(
            f"tputrain.checkpoint.{'store.os.rename' if after == 'COMPLETE' else 'integrity._vouch_for'}", die
        )
        with pytest.raises(Killed):
            CheckpointStore(written.parent).take_over()
    assert (written / after).exists()
    store = CheckpointStore(written.parent)
    store.take_over()
    verify(store.path(6))
    assert {path.name for path in store.path(6).iterdir()} == {
        "long", "short", "empty", "checksums.json", "COMPLETE",
    }  # fmt: skip


def die(*_: object) -> None:
    raise Killed


def test_a_disk_that_does_not_take_it_is_one_line_and_it_stays(written, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr("tputrain.checkpoint.store.seal", full)
        with pytest.raises(UserError, match=r"step-6: .* cannot be finished \(No space left on device\)"):
            CheckpointStore(written.parent).take_over()
    assert is_written(written)


def test_a_run_killed_while_it_hashes_a_checkpoint_goes_on_from_it(tmp_path, capsys):
    assert run_until_signal(tmp_path, "kill-seal", 6) == -signal.SIGKILL
    assert CheckpointStore(tmp_path / "checkpoints").steps() == [3]
    aside = tmp_path.with_name("aside")
    shutil.copytree(tmp_path, aside)
    build(tmp_path).fit()
    assert "resumed from" in (said := capsys.readouterr().out)
    assert "step-6 at step 6" in said
    (aside / "checkpoints" / ".unfinished-step-6" / "model.safetensors").write_bytes(b"damaged")
    build(aside).fit()
    assert "step-3 at step 3" in capsys.readouterr().out


def test_no_step_counts_before_the_files_of_a_checkpoint_are_written(tmp_path, monkeypatch):
    monkeypatch.setattr(background, "_LONGEST_WAIT", 60.0)
    trainer = build(tmp_path)
    counted_at_mark: list[tuple[int, int]] = []
    write = trainer.store.write

    def write_slowly(step, fill, num_bytes, rest, written):
        def fill_slowly(directory: Path) -> None:
            fill(directory)
            time.sleep(0.1)  # steps take a millisecond
            counted_at_mark.append((step, trainer.step))

        return write(step, fill_slowly, num_bytes, rest, written)

    trainer.store.write = write_slowly
    trainer.fit()
    assert counted_at_mark == [(3, 3), (6, 6), (9, 9), (12, 12), (14, 14)]


def test_a_slow_disk_is_waited_for_once(tmp_path, monkeypatch):
    """Steps go on after the longest wait: this test would not end."""
    monkeypatch.setattr(background, "_LONGEST_WAIT", 0.01)
    trainer, goes_on = build(tmp_path), threading.Event()
    write = trainer.store.write

    def write_late(step, fill, *more):
        goes_on.wait(60)
        return write(step, fill, *more)

    trainer.store.write = write_late

    class LetsGo(Callback):
        def on_step_end(self, trainer: Trainer) -> None:
            if trainer.step == 5:
                goes_on.set()

    trainer.callbacks.append(LetsGo())
    trainer.fit()
    assert trainer.store.steps() == [14, 12, 9]
