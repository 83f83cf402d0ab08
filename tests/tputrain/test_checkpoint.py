"""A checkpoint is used only if every byte of it is what was written."""

import errno
import os
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.tputrain.resumable_run import build
from tputrain import CheckpointConfig, RunConfig, RunFailedError, Trainer, TrainerConfig, UserError
from tputrain.callbacks.callback import Callback
from tputrain.checkpoint.integrity import DamagedCheckpointError, seal, verify
from tputrain.checkpoint.rows import rows_of
from tputrain.checkpoint.store import CheckpointStore
from tputrain.data import Tokenizer
from tputrain.loggers.jsonl import read_jsonl
from tputrain.models import ModelConfig, initialize
from tputrain.snapshot import contents
from tputrain.snapshot.background import BackgroundWriter
from tputrain.snapshot.snapshot import Snapshot

TINY = ModelConfig(
    name="llama-5m",
    vocab_size=300,
    hidden_size=8,
    intermediate_size=8,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=4,
)
LLAMA_FILES = {
    "COMPLETE",
    "checksums.json",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "optimizer.safetensors",
    "special_tokens_map.json",
    "state.json",
    "tokenizer.json",
    "tokenizer_config.json",
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> Path:
    """Two checkpoints of a tiny Llama, with every file that a checkpoint can have."""
    run_dir = tmp_path_factory.mktemp("run")
    model = TINY.build_empty()
    initialize(model, seed=0)
    tokenizer = Tokenizer.train(["def f(x): return x"], vocab_size=270)
    ids = torch.arange(8)[None]
    batches = [{"input_ids": ids, "labels": ids + 1}]
    cfg = RunConfig(device="cpu", run_dir=str(run_dir), trainer=TrainerConfig(steps=2))
    trainer = Trainer(model, cfg, train_loader=batches, tokenizer=tokenizer)
    trainer.step = 1
    trainer.save()
    trainer.step = 2
    trainer.save()
    return run_dir / "checkpoints"


def test_a_llama_s_checkpoint_has_exactly_the_files_that_the_damage_tests_know(checkpoints):
    assert {path.name for path in (checkpoints / "step-2").iterdir()} == LLAMA_FILES
    verify(checkpoints / "step-2")


def newest_with(checkpoints: Path, file: Path, content: bytes | None) -> tuple[Path | None, list[str]]:
    """What the store picks, and what it says, while `file` has other content (None: is missing)."""
    original = file.read_bytes()
    said: list[str] = []
    try:
        file.unlink() if content is None else file.write_bytes(content)
        picked = CheckpointStore(checkpoints).newest(
            lambda path, reason, used: said.append(f"{path.name}: {reason}")
        )
    finally:
        file.write_bytes(original)
    return picked, said


@pytest.mark.parametrize("name", ["COMPLETE", "checksums.json"])
def test_every_single_byte_of_the_files_that_vouch_for_the_others_is_vouched_for(checkpoints, name):
    file = checkpoints / "step-2" / name
    whole = file.read_bytes()
    try:
        for place in range(len(whole)):
            file.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
            with pytest.raises(DamagedCheckpointError, match=f"^{name}: damaged"):
                verify(checkpoints / "step-2")
    finally:
        file.write_bytes(whole)


@pytest.mark.parametrize("name", sorted(LLAMA_FILES))
def test_each_file_damaged_in_any_way_is_refused_by_name(checkpoints, name):
    file = checkpoints / "step-2" / name
    whole = file.read_bytes()
    places = {0, 1, len(whole) // 3, len(whole) // 2, len(whole) - 2, len(whole) - 1}
    damages: list[bytes | None] = [None, b"", whole[:-1], whole[: len(whole) // 2], whole + b"\n"]
    for place in sorted(places):
        for flip in (0x01, 0x20, 0x80):
            damages.append(whole[:place] + bytes([whole[place] ^ flip]) + whole[place + 1 :])
    for damage in damages:
        picked, said = newest_with(checkpoints, file, damage)
        assert picked == checkpoints / "step-1"
        assert len(said) == 1
        assert said[0].startswith(f"step-2: {name}: "), said
    verify(checkpoints / "step-2")


def test_no_file_of_a_checkpoint_is_a_pickle(checkpoints):
    for path in (checkpoints / "step-2").iterdir():
        assert path.suffix in (".json", ".safetensors", "")
        assert not path.read_bytes().startswith((b"\x80", b"PK"))


def test_a_damaged_checkpoint_named_by_the_user_is_an_error_that_names_the_file(tmp_path):
    build(tmp_path, trainer=TrainerConfig(steps=1)).fit()
    path = tmp_path / "checkpoints" / "step-1"
    (path / "optimizer.safetensors").unlink()
    with pytest.raises(UserError, match=r"step-1 cannot be used: optimizer.safetensors: missing"):
        build(tmp_path).resume(path)


def write_text(text: str):
    def fill(directory: Path) -> None:
        (directory / "state.json").write_text(text)

    return fill


def test_a_save_that_fails_leaves_what_was_there(tmp_path):
    store = CheckpointStore(tmp_path)
    store.write(1, write_text("old"))

    def fail(directory: Path) -> None:
        (directory / "state.json").write_text("half")
        raise OSError("No space left on device")

    with pytest.raises(OSError, match="No space"):
        store.write(1, fail)
    assert (store.newest(lambda path, reason, used: None) / "state.json").read_text() == "old"
    store.write(2, write_text("new"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-1", "step-2"]


class Killed(BaseException):
    """Stands for a SIGKILL: nothing in the store may act on it."""


def kill_at_rename(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Die before rename `number` (from 0)."""
    rename, done = os.rename, []

    def rename_or_die(*arguments) -> None:
        if len(done) == number:
            raise Killed
        done.append(arguments)
        rename(*arguments)

    monkeypatch.setattr("tputrain.checkpoint.store.os.rename", rename_or_die)


@pytest.mark.parametrize("number", [0, 1])
def test_killed_while_a_step_is_saved_again_the_first_save_of_it_is_still_there(
    tmp_path, monkeypatch, number
):
    CheckpointStore(tmp_path).write(7, write_text("old"))
    with monkeypatch.context() as dying:
        kill_at_rename(dying, number)
        with pytest.raises(Killed):
            CheckpointStore(tmp_path).write(7, write_text("new"))
    store = CheckpointStore(tmp_path)
    store.recover()
    verify(tmp_path / "step-7")
    assert (tmp_path / "step-7" / "state.json").read_text() == "old"
    store.write(7, write_text("newer"))
    assert (tmp_path / "step-7" / "state.json").read_text() == "newer"
    assert [path.name for path in tmp_path.iterdir()] == ["step-7"]


def test_a_run_killed_between_the_renames_of_a_second_save_goes_on_from_the_first(tmp_path, monkeypatch):
    trainer = build(tmp_path, trainer=TrainerConfig(steps=3))
    trainer.fit()
    with monkeypatch.context() as dying:
        kill_at_rename(dying, 1)
        with pytest.raises(Killed):
            trainer.save()
    assert not (tmp_path / "checkpoints" / "step-3").exists()
    again = build(tmp_path, trainer=TrainerConfig(steps=4))
    again.fit()
    assert [record["step"] for record in read_jsonl(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-3", "step-4"]


def test_the_last_ones_are_kept_and_a_step_can_be_saved_again(tmp_path):
    store = CheckpointStore(tmp_path, keep_last=2)
    for step in (5, 10, 15, 15):
        store.write(step, write_text(str(step)))
    assert store.steps() == [15, 10]


def test_a_checkpoint_set_aside_does_not_count_among_those_kept(tmp_path):
    store = CheckpointStore(tmp_path, keep_last=2)
    for step in (5, 10):
        store.write(step, write_text(str(step)))
    (tmp_path / "step-10" / "COMPLETE").unlink()
    assert store.newest(lambda path, reason, used: store.set_aside(path)) == tmp_path / "step-5"
    store.write(10, write_text("10 again"))
    (tmp_path / "step-10" / "COMPLETE").unlink()
    store.newest(lambda path, reason, used: store.set_aside(path))
    assert store.steps() == [5]
    assert sorted(path.name for path in tmp_path.glob("refused-*")) == [
        "refused-step-10-1",
        "refused-step-10-2",
    ]


@pytest.mark.parametrize(("train", "validate"), [("compile", "compile"), ("captured", "fused")])
def test_evaluations_that_were_to_do_what_training_does_have_its_form(tmp_path, train, validate):
    forms = {"train": train, "validate": "auto", "sample": "strict"}
    contents.write_state(
        contents.state_text({"step": 1, "config": {"execution": forms}, "versions": {}}), tmp_path
    )
    loaded = contents.load_state(tmp_path)["config"]["execution"]
    assert loaded == {"train": train, "validate": validate, "sample": "strict"}


def test_a_directory_where_a_file_should_be_is_refused(tmp_path):
    (tmp_path / "state.json").write_text("{}")
    seal(tmp_path)
    (tmp_path / "state.json").unlink()
    (tmp_path / "state.json").mkdir()
    with pytest.raises(DamagedCheckpointError, match=r"state.json"):
        verify(tmp_path)


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.ESTALE])
def test_a_file_that_cannot_be_read_just_now_is_an_error_and_no_damage(tmp_path, monkeypatch, number):
    build(tmp_path, trainer=TrainerConfig(steps=1)).fit()
    opened = Path.open

    def fail(path: Path, *arguments, **options):
        if path.name == "optimizer.safetensors":
            raise OSError(number, os.strerror(number), str(path))
        return opened(path, *arguments, **options)

    with monkeypatch.context() as broken:
        broken.setattr(Path, "open", fail)
        with pytest.raises(
            UserError, match=rf"optimizer.safetensors: cannot be read now \({os.strerror(number)}"
        ):
            build(tmp_path).fit()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-1"]
    assert build(tmp_path).resume()


def test_tensors_that_share_memory_are_each_written_out(tmp_path):
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = nn.Parameter(model[0].weight.data)  # two parameters over one storage
    tensors = contents.model_tensors(model)
    layout = contents.layout_of(contents.MODEL, tensors)
    layout.create(tmp_path)
    layout.write(tmp_path, contents.own_rows(tensors))
    other = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    contents.load_model(other, tmp_path)
    assert torch.equal(other[0].weight, model[0].weight)
    assert torch.equal(other[1].weight, model[1].weight)


class Counting(nn.Module):
    """Counts its calls in a state that is neither a parameter nor a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.count = nn.Linear(4, 2), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += self.training
        return self.layer(x)

    def get_extra_state(self) -> torch.Tensor:
        return torch.tensor(self.count)

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.count = int(state)


@pytest.mark.parametrize("make_model", [Counting, lambda: nn.Sequential(Counting())])
def test_extra_state_of_a_module_is_gone_on_with(tmp_path, make_model):
    def trained_to(steps: int) -> nn.Module:
        cfg = RunConfig(device="cpu", run_dir=str(tmp_path), trainer=TrainerConfig(steps=steps))
        batches = [(torch.ones(3, 4), torch.tensor([0, 1, 1]))]
        trainer = Trainer(make_model(), cfg, train_loader=batches)
        trainer.fit()
        return trainer.model

    trained_to(3)
    (counting,) = (each for each in trained_to(5).modules() if isinstance(each, Counting))
    assert counting.count == 5


def test_optimizer_state_that_json_cannot_hold_is_an_error():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model.weight]["history"] = [1, 2]
    with pytest.raises(UserError, match="the state of SGD holds a list"):
        contents.optimizer_contents(optimizer, model)


class Disk:
    """A disk that fails as it is told to, under all checkpoints of a run; `failures` by step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, failures: dict[int, int]):
        """`failures`: how many writes of a step's checkpoint fail, beginning with the first."""
        self.failures, self.tried = dict(failures), []
        write = CheckpointStore.write

        def write_or_fail(store, step, fill, *more):
            def fill_or_fail(directory: Path) -> None:
                fill(directory)
                self.tried.append(step)
                if self.failures.get(step, 0) > 0:
                    self.failures[step] -= 1
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

            return write(store, step, fill_or_fail, *more)

        monkeypatch.setattr(CheckpointStore, "write", write_or_fail)


@pytest.mark.parametrize("background", [True, False])
def test_a_full_disk_stops_no_training_and_costs_no_checkpoint(tmp_path, monkeypatch, capfd, background):
    disk = Disk(monkeypatch, {6: 99, 9: 99})
    trainer = build(tmp_path, checkpoint=CheckpointConfig(every=3, keep_last=3, background=background))

    class Looks(Callback):
        kept: list[int] = []  # noqa: RUF012

        def on_step_end(self, trainer):
            if trainer.step == 11:
                self.kept += trainer.store.steps()

    trainer.callbacks.append(Looks())
    trainer.fit()
    assert disk.tried == [3, 6, 9, 12, 14]
    assert Looks.kept == [3]
    assert trainer.store.steps() == [14, 12, 3]
    for step in trainer.store.steps():
        verify(trainer.store.path(step))
    assert not list((tmp_path / "checkpoints").glob(".unfinished*"))
    said = capfd.readouterr().err
    assert "step-6 NOT SAVED: No space left on device; the next occasion tries again" in said


def test_a_run_that_could_save_nothing_says_that_it_begins_anew(tmp_path, monkeypatch):
    Disk(monkeypatch, dict.fromkeys(range(99), 99))
    told = "there is no checkpoint before, so all is lost; .* run again: it begins anew"
    with pytest.raises(RunFailedError, match=told):
        build(tmp_path).fit()


def test_the_last_checkpoint_is_tried_twice_and_then_its_loss_is_an_error(tmp_path, monkeypatch, capfd):
    Disk(monkeypatch, {14: 1})
    build(tmp_path / "once").fit()
    disk = Disk(monkeypatch, {14: 99})
    with pytest.raises(RunFailedError, match=r"step-14 cannot be saved \(No space left on device\): "):
        build(tmp_path / "always").fit()
    assert disk.tried[-3:] == [12, 14, 14]
    said = capfd.readouterr().err
    assert said.count("always/checkpoints/step-14 NOT SAVED") == 1  # of the second try the error tells
    assert max(CheckpointStore(tmp_path / "always" / "checkpoints").steps()) == 12


def test_a_process_that_leaves_in_the_middle_says_where_the_disk_does_not_take_its_state(
    tmp_path, monkeypatch, capfd
):
    class Left(BaseException):
        """Stands for os._exit."""

    def leave(code: int) -> None:
        raise Left(code)

    monkeypatch.setattr(os, "_exit", leave)
    Disk(monkeypatch, {3: 1})
    snapshot = Snapshot(3, nn.Linear(1, 1), None, {"weight": rows_of(torch.ones(1))}, {}, {}, "{}")
    rescue = BackgroundWriter().leaving_with(CheckpointStore(tmp_path / "checkpoints"), snapshot)
    with pytest.raises(Left, match=r"^1$"):
        rescue(15)
    assert "step-3 cannot be saved (No space left on device): leaving without it" in capfd.readouterr().err
    with pytest.raises(Left, match="143"):
        rescue(15)
    verify(tmp_path / "checkpoints" / "step-3")


def test_room_is_looked_for_before_anything_is_written(tmp_path):
    store = CheckpointStore(tmp_path)
    store.write(1, write_text("old"))
    with pytest.raises(OSError, match=r"No space left on device \(1,000,000,000,000.0 MB needed, .* MB free"):
        store.write(2, write_text("new"), num_bytes=10**18)
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]
    store.write(2, write_text("new"))
    with pytest.raises(
        OSError, match=r"the 2 that are there stay: a smaller checkpoint.keep_last leaves room"
    ):
        store.write(3, write_text("newer"), num_bytes=10**18)


def test_training_goes_on_while_a_checkpoint_is_written_and_is_not_in_it(tmp_path, uninterrupted_run):
    """The write of step 3 is held up until step 5 is done; what it writes is the state of step 3."""
    goes_on = threading.Event()
    trainer = build(tmp_path)
    trainer.store.write, write = (
        lambda *arguments: (goes_on.wait(60), write(*arguments))[1],
        trainer.store.write,
    )

    class LetsGo(Callback):
        busy: list[bool] = []  # noqa: RUF012

        def on_step_end(self, trainer):
            if trainer.step == 5:
                self.busy.append(trainer.store.steps() == [])
                goes_on.set()

    trainer.callbacks.append(LetsGo())
    trainer.store.keep_last = 9
    trainer.fit()
    assert LetsGo.busy == [True]
    for step in (3, 12, 14):
        ours, theirs = (run / "checkpoints" / f"step-{step}" for run in (tmp_path, uninterrupted_run))
        for name in ("model.safetensors", "optimizer.safetensors"):
            assert (ours / name).read_bytes() == (theirs / name).read_bytes()


@pytest.fixture
def uninterrupted_run(tmp_path_factory) -> Path:
    run_dir = tmp_path_factory.mktemp("in-step")
    checkpoint = CheckpointConfig(every=3, keep_last=9, background=False)
    build(run_dir, checkpoint=checkpoint).fit()
    return run_dir


def test_on_save_tells_of_complete_checkpoints_in_order(tmp_path):
    class Told(Callback):
        steps: list[int] = []  # noqa: RUF012

        def on_save(self, trainer, checkpoint):
            verify(checkpoint)
            self.steps.append(int(checkpoint.name.removeprefix("step-")))

    trainer = build(tmp_path)
    trainer.callbacks.append(Told())
    trainer.fit()
    assert Told.steps == [3, 6, 9, 12, 14]


def test_what_cannot_be_kept_in_a_checkpoint_is_said_at_once_and_by_the_run_itself(tmp_path):
    class Odd(Callback):
        def state_dict(self):
            return {"when": object()}

        def load_state_dict(self, state):
            raise AssertionError

    trainer = build(tmp_path)
    trainer.callbacks.append(Odd())
    with pytest.raises(UserError, match="state of callbacks and schedulers must be plain JSON"):
        trainer.fit()


def test_a_dtype_that_no_checkpoint_holds_is_said_before_the_first_step(tmp_path):
    model = nn.Linear(4, 2)
    model.register_buffer("waves", torch.zeros(3, dtype=torch.complex128))
    batches = [(torch.ones(3, 4), torch.tensor([0, 1, 1]))]
    trainer = Trainer(model, RunConfig(device="cpu", run_dir=str(tmp_path)), train_loader=batches)
    with pytest.raises(UserError, match=r"^waves is torch\.complex128, which a checkpoint .* cannot hold"):
        trainer.fit()
    assert trainer.step == 0
