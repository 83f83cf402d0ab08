"""Checkpoints copied to other storage, and a run that goes on from there on a machine that has nothing."""

import errno
import itertools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest

from tests.tputrain.resumable_run import STEPS, build
from tputrain import CheckpointConfig, Trainer, UserError
from tputrain.callbacks.callback import Callback
from tputrain.checkpoint.store import CheckpointStore
from tputrain.loggers.jsonl import read_jsonl
from tputrain.watchdog import SETTING_UP, WatchdogConfig


def mirrored(url: str) -> CheckpointConfig:
    return CheckpointConfig(every=3, keep_last=2, keep_every=6, mirror=url)


class StopsAfterNine(Callback):
    def on_step_end(self, trainer: Trainer) -> None:
        trainer.control.stop = trainer.step == 9


def first_half(run_dir: Path, url: str) -> None:
    trainer = build(run_dir, checkpoint=mirrored(url))
    trainer.callbacks.append(StopsAfterNine())
    trainer.fit()


def losses(run_dir: Path) -> list[tuple[int, str]]:
    return [(record["step"], record["loss_hex"]) for record in read_jsonl(run_dir / "metrics.jsonl")]


@pytest.fixture(params=["memory", "file"])
def url(request, tmp_path) -> str:
    fsspec.filesystem("memory").store.clear()
    return f"memory://{tmp_path.name}" if request.param == "memory" else f"file://{tmp_path}/mirror"


def test_a_machine_that_has_nothing_goes_on_from_the_mirror(tmp_path, url, capsys):
    first_half(tmp_path / "first", url)
    shutil.rmtree(tmp_path / "first")
    trainer = build(tmp_path / "second", checkpoint=mirrored(url))
    trainer.fit()
    assert f"fetching checkpoint step-9 from {url}" in capsys.readouterr().out
    build(tmp_path / "whole", checkpoint=mirrored(f"{url}-whole")).fit()
    assert losses(tmp_path / "second") == losses(tmp_path / "whole")
    assert [step for step, _ in losses(tmp_path / "second")] == list(range(1, STEPS + 1))
    assert trainer.store.steps() == [14, 12]
    assert trainer.store.mirror.steps() == [14, 12, 6]  # what is kept for ever stays, though it is not here


def test_a_machine_that_was_away_goes_on_from_what_another_has_done_meanwhile(tmp_path, url):
    first_half(tmp_path / "away", url)
    build(tmp_path / "other", checkpoint=mirrored(url)).fit()
    store = CheckpointStore.of_run(tmp_path / "away", mirrored(url))
    assert store.steps() == [9, 6]
    assert store.newest(lambda *_: None).name == "step-14"
    assert [step for step, _ in losses(tmp_path / "away")] == list(range(1, STEPS + 1))


def test_a_copy_that_was_cut_short_or_damaged_does_not_count(tmp_path, url, capsys):
    first_half(tmp_path / "first", url)
    mirror = CheckpointStore.of_run(tmp_path / "other", mirrored(url)).mirror
    newest = f"{mirror.root}/checkpoints/step-9"
    content = mirror.filesystem.cat(f"{newest}/model.safetensors")
    mirror.filesystem.pipe(f"{newest}/model.safetensors", content[:-1] + b"!")
    store = CheckpointStore.of_run(tmp_path / "damaged", mirrored(url))
    assert store.newest(lambda *_: None).name == "step-6"
    assert "step-9 refused: model.safetensors: damaged" in capsys.readouterr().out
    mirror.filesystem.rm(f"{newest}/COMPLETE")
    assert mirror.steps() == [6]


def test_a_copy_that_somebody_made_by_hand_does_not_count_and_stands_in_nobodys_way(tmp_path, url):
    first_half(tmp_path / "first", url)
    store = CheckpointStore.of_run(tmp_path / "first", mirrored(url))
    there = f"{store.mirror.root}/checkpoints"
    store.mirror.filesystem.cp(f"{there}/step-9", f"{there}/step-9-good", recursive=True)
    assert store.mirror.steps() == [9, 6]
    assert store.mirror.push(store.path(9), set) is None


def test_a_step_that_is_copied_again_stays_there_until_the_new_copy_is_whole(tmp_path, url, monkeypatch):
    first_half(tmp_path, url)
    store = CheckpointStore.of_run(tmp_path, mirrored(url))
    mirror, there = store.mirror, f"{store.mirror.root}/checkpoints"
    before = mirror.filesystem.cat_file(f"{there}/step-9/model.safetensors")
    with monkeypatch.context() as patch:
        patch.setattr(mirror, "_put", lambda file, _: file.suffix != ".safetensors" or 1 / 0)
        assert "ZeroDivisionError" in mirror.push(store.path(9), set)
    assert mirror.filesystem.cat_file(f"{there}/.replaced-step-9/model.safetensors") == before
    assert mirror.push(store.path(9), set) is None
    assert mirror.steps() == [9, 6]
    assert not mirror.filesystem.exists(f"{there}/.replaced-step-9")


class KilledError(BaseException):
    pass


def write_small(run_dir: Path, url: str, step: int, text: str = "{}") -> CheckpointStore:
    store = CheckpointStore.of_run(run_dir, mirrored(url))

    def fill(directory: Path) -> None:
        for name in ("model.safetensors", "optimizer.safetensors", "state.json"):
            (directory / name).write_text(f"{name} {text}")

    store.write(step, fill)
    return store


def killed_at(moment: int, filesystem: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on, the `moment`th change of a file in `filesystem` is not made any more."""
    moments = itertools.count()

    def kills(change: Callable[..., None]) -> Callable[..., None]:
        def change_or_die(*arguments: Any, **more: Any) -> None:
            if next(moments) == moment:
                raise KilledError
            change(*arguments, **more)

        return change_or_die

    for name in ("put_file", "cp_file", "rm_file"):
        monkeypatch.setattr(filesystem, name, kills(getattr(filesystem, name)))


def test_killed_at_any_moment_of_a_second_copy_the_mirror_has_a_whole_one(tmp_path, url, monkeypatch):
    for moment in itertools.count():
        run_dir, there = tmp_path / f"run-{moment}", f"{url}-{moment}"
        store = write_small(run_dir, there, 9, "first")
        assert store.mirror.push(store.path(9), set) is None
        write_small(run_dir, there, 9, "second")
        with monkeypatch.context() as patch:
            killed_at(moment, store.mirror.filesystem, patch)
            try:
                store.mirror.push(store.path(9), set)
                break
            except KilledError:
                pass
        elsewhere = CheckpointStore.of_run(tmp_path / f"elsewhere-{moment}", mirrored(there))
        assert elsewhere.has_any()
        assert elsewhere.newest() == elsewhere.path(9)
        with monkeypatch.context() as patch:  # and of the next try
            killed_at(moment, store.mirror.filesystem, patch)
            try:
                store.mirror.push(store.path(9), set)
            except KilledError:
                shutil.rmtree(elsewhere.directory)
                assert elsewhere.newest() == elsewhere.path(9)
        assert store.mirror.push(store.path(9), set) is None
        names = [path.split("/")[-1] for path in store.mirror.filesystem.ls(f"{there}/checkpoints", False)]
        assert names == ["step-9"]
        elsewhere.mirror.fetch_step(9, tmp_path / f"new-{moment}")
        copied = tmp_path / f"new-{moment}" / "checkpoints" / "step-9" / "state.json"
        assert copied.read_text() == "state.json second"
    assert moment > 10


def test_a_first_copy_is_set_aside_or_removed_as_the_step_that_it_is_of(tmp_path, url):
    store = write_small(tmp_path, url, 9)
    mirror, there = store.mirror, f"{store.mirror.root}/checkpoints"
    for step in (9, 11, 12):
        write_small(tmp_path, url, step)
        assert mirror.push(store.path(step), set) is None
        if step != 12:
            mirror.filesystem.mv(f"{there}/step-{step}", f"{there}/.replaced-step-{step}", recursive=True)
    assert mirror.steps() == [12, 11, 9]
    mirror.abandon_later(9)
    assert mirror.steps() == [9]
    assert mirror.filesystem.exists(f"{there}/abandoned-step-11-1/COMPLETE")
    write_small(tmp_path, url, 10)
    assert mirror.push(store.path(10), lambda steps: {10}) is None
    assert mirror.steps() == [10]


def test_a_run_whose_copies_were_all_set_aside_does_not_begin_anew(tmp_path, url):
    store = write_small(tmp_path / "run", url, 300)
    assert store.mirror.push(store.path(300), set) is None
    store.abandon_later(100)
    shutil.rmtree(tmp_path / "run")
    store = CheckpointStore.of_run(tmp_path / "run", mirrored(url))
    assert store.has_any()
    with pytest.raises(UserError, match=rf"set aside before.*run_dir and checkpoint.mirror .*{url}"):
        store.newest()


def test_a_mirror_that_fails_is_one_loud_line_and_training_goes_on(tmp_path, monkeypatch, capfd):
    trainer = build(tmp_path, checkpoint=mirrored("memory://there"))

    def fails(*_: object, **__: object) -> None:
        raise PermissionError("403\nForbidden")

    monkeypatch.setattr(trainer.store.mirror.filesystem, "put_file", fails)
    trainer.fit()
    assert trainer.step == STEPS
    said = capfd.readouterr().err
    assert "step-3 NOT COPIED to checkpoint.mirror: PermissionError: 403 Forbidden\n" in said
    assert trainer.store.steps() == [14, 12, 6]


def test_a_last_copy_that_failed_is_made_at_the_next_start_of_the_finished_run(
    tmp_path, url, monkeypatch, capfd
):
    trainer = build(tmp_path / "run", checkpoint=mirrored(url))
    mirror, put_file = trainer.store.mirror, trainer.store.mirror.filesystem.put_file

    def fails(file: str, there: str, **more: Any) -> None:
        if f"step-{STEPS}/model" in there:
            raise PermissionError("403")
        put_file(file, there, **more)

    with monkeypatch.context() as patch:
        patch.setattr(mirror.filesystem, "put_file", fails)
        trainer.fit()
        assert mirror.steps() == [12, 9, 6]
        capfd.readouterr()
        build(tmp_path / "run", checkpoint=mirrored(url)).fit()
        said = capfd.readouterr().err
        assert f"step-{STEPS} NOT COPIED to checkpoint.mirror: PermissionError: 403\n" in said
    build(tmp_path / "run", checkpoint=mirrored(url)).fit()
    assert f"copying checkpoint step-{STEPS} to {url}" in capfd.readouterr().out
    assert mirror.steps() == [STEPS, 12, 9, 6]
    build(tmp_path / "run", checkpoint=mirrored(url)).fit()
    assert "copying" not in capfd.readouterr().out
    shutil.rmtree(tmp_path / "run")
    assert trainer.store.newest() == trainer.store.path(STEPS)


def test_a_checkpoint_of_a_step_that_was_saved_anew_was_not_copied_yet(tmp_path, url, capsys):
    store = write_small(tmp_path / "run", url, 9, "first")
    store.copy_missed(9)
    write_small(tmp_path / "run", url, 9, "second")
    store.copy_missed(9)
    shutil.rmtree(tmp_path / "run")
    assert (store.newest() / "state.json").read_text() == "state.json second"
    assert capsys.readouterr().out.count("copying checkpoint step-9") == 4  # each before and after
    store.copy_missed(9)
    assert "copying" not in capsys.readouterr().out


@pytest.mark.parametrize("where", ["here", "there"])
def test_a_copy_that_takes_longer_than_the_watchdog_s_limit_is_alive_while_data_comes(
    tmp_path, url, monkeypatch, where
):
    first_half(tmp_path / "run", url)
    trainer = build(tmp_path / "run", checkpoint=mirrored(url), watchdog=WatchdogConfig(setup_seconds=60))
    mirror, watchdog = trainer.store.mirror, trainer._watchdog
    if where == "here":
        shutil.rmtree(tmp_path / "run")
    else:
        mirror.filesystem.rm(f"{mirror.root}/checkpoints", recursive=True)
    copied: list[str] = []
    ended: list[str] = []
    monkeypatch.setattr(watchdog, "_end_the_process", lambda phase, found: ended.append(found))

    def slow(copy: Callable[..., None]) -> Callable[..., None]:
        def copy_slowly(source: str, target: str, **more: Any) -> None:
            if watchdog._phase.name == SETTING_UP:
                copied.append(target)
                watchdog.look(50)
            copy(source, target, **more)

        return copy_slowly

    for name in ("get_file", "put_file"):
        monkeypatch.setattr(mirror.filesystem, name, slow(getattr(mirror.filesystem, name)))
    trainer.fit()
    assert len(copied) > 3
    assert not ended


def test_a_mirror_that_cannot_be_read_is_not_taken_for_an_empty_one(tmp_path, monkeypatch):
    store = CheckpointStore.of_run(tmp_path, mirrored("memory://there"))

    def fails(*_: object) -> None:
        raise TimeoutError("no answer")

    monkeypatch.setattr(store.mirror.filesystem, "glob", fails)
    with pytest.raises(UserError, match=r"memory://there cannot be read \(TimeoutError: no answer\)"):
        store.newest(lambda *_: None)


def spoil(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").write_bytes(b"spoilt")


def test_what_is_damaged_here_is_taken_from_the_mirror(tmp_path, url, capsys):
    first_half(tmp_path / "run", url)
    store = CheckpointStore.of_run(tmp_path / "run", mirrored(url))
    spoil(store.path(9))
    assert store.newest(lambda *_: None) == store.path(9)
    assert "step-9 was damaged (model.safetensors: 6 bytes" in capsys.readouterr().out
    assert (store.directory / "refused-step-9-1").is_dir()
    build(tmp_path / "run", checkpoint=mirrored(url)).fit()
    assert [step for step, _ in losses(tmp_path / "run")] == list(range(1, STEPS + 1))


def test_where_all_is_damaged_here_an_older_one_of_the_mirror_is_taken(tmp_path, url):
    first_half(tmp_path / "run", url)
    store = CheckpointStore.of_run(tmp_path / "run", mirrored(url))
    shutil.rmtree(store.path(6))
    spoil(store.path(9))
    mirror = store.mirror
    mirror.filesystem.rm(f"{mirror.root}/checkpoints/step-9", recursive=True)
    refused: list[str] = []
    assert store.newest(lambda path, *_: refused.append(path.name)) == store.path(6)
    assert refused == ["step-9"]


def test_a_full_disk_here_is_not_the_mirror_s_fault_and_nothing_half_fetched_stays(tmp_path, monkeypatch):
    first_half(tmp_path / "first", "memory://there")
    store = CheckpointStore.of_run(tmp_path / "second", mirrored("memory://there"))

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr(store.mirror.filesystem, "get_file", full)
        with pytest.raises(
            UserError, match=r"second/checkpoints: no room .* \(No space left on device\): make"
        ):
            store.newest(lambda *_: None)
    assert not list(store.directory.iterdir())


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("bucket/runs", "expected a URL such as"),
        ("nowhere://bucket", "checkpoint.mirror=nowhere://bucket: .*nowhere"),
    ],
)
def test_a_url_that_nothing_serves_is_refused_at_once(tmp_path, url, said):
    with pytest.raises(UserError, match=said):
        build(tmp_path, checkpoint=mirrored(url))


def test_a_url_for_the_run_itself_is_told_where_it_belongs(tmp_path):
    with pytest.raises(UserError, match=r"run_dir=gs://bucket/run: expected a local .*checkpoint.mirror=URL"):
        build("gs://bucket/run")
