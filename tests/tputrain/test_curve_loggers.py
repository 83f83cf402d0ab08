"""TensorBoard and Weights & Biases: what they hold after kills and resumes, without a network."""

import errno
import json
import os
import signal
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.tputrain.resumable_run import STEPS, build
from tputrain import LogConfig, Trainer, UserError
from tputrain.callbacks.callback import Callback
from tputrain.loggers.config import build_loggers
from tputrain.loggers.jsonl import read_jsonl
from tputrain.loggers.tensorboard import TensorBoardLogger
from tputrain.loggers.wandb import ID_FILE, WandbConfig, WandbLogger
from tputrain.signals import Interrupted

ROOT = Path(__file__).resolve().parents[2]
EVALUATED = [0, 4, 8, 12, STEPS]


def log_config(kind: str) -> LogConfig:
    wandb = WandbConfig(mode="offline" if kind == "wandb" else "off", project="tests")
    return LogConfig(every=5, progress="none", tensorboard=kind == "tensorboard", wandb=wandb)


def run_until_killed(run_dir: Path, kind: str, moment: str, step: int) -> None:
    command = [sys.executable, __file__, str(run_dir), kind, moment, str(step)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, timeout=120)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()


def tensorboard_steps(directory: Path, tag: str) -> list[int]:
    """The steps that TensorBoard shows."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory), purge_orphaned_data=True)
    events.Reload()
    return [event.step for event in events.Scalars(tag)]


def test_tensorboard_shows_each_step_once_after_sigkill_and_resume(tmp_path):
    run_until_killed(tmp_path, "tensorboard", "kill-evaluation", 8)
    build(tmp_path, log=log_config("tensorboard")).fit()
    directory = tmp_path / "tensorboard"
    assert len(list(directory.iterdir())) == 2
    assert tensorboard_steps(directory, "train/loss") == list(range(1, STEPS + 1))
    assert tensorboard_steps(directory, "evaluation/loss") == EVALUATED


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # TensorBoard's thread
def test_curves_on_a_full_disk_end_and_the_run_goes_on(tmp_path, monkeypatch, capfd):
    from tensorboard.summary.writer.record_writer import RecordWriter

    def refuse(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    logger = TensorBoardLogger(tmp_path)
    logger.start(0, 10, False)
    monkeypatch.setattr(RecordWriter, "write", refuse)
    for step in range(1, 30):
        logger.log([{"step": step, "loss": 0.5}])
    logger.close()
    said = capfd.readouterr().err
    assert said.count("TensorBoard's curves end here (No space left on device)") == 1


class CrashesAt(Callback):
    def __init__(self, step: int):
        self.step = step

    def on_step_end(self, trainer: Trainer) -> None:
        if trainer.step == self.step:
            raise KeyboardInterrupt


class TerminatedAt(Callback):
    def __init__(self, step: int):
        self.step = step

    def on_step_end(self, trainer: Trainer) -> None:
        if trainer.step == self.step:
            os.kill(os.getpid(), signal.SIGTERM)


def test_an_evaluation_made_after_a_resume_and_again_after_a_crash_is_there_once(tmp_path):
    """SIGTERM at an evaluation's step: saved without it. Evaluated after the resume, lost and repeated."""
    both = replace(log_config("wandb"), tensorboard=True)
    for callback, ends_by in ((TerminatedAt(8), Interrupted), (CrashesAt(9), KeyboardInterrupt)):
        trainer = build(tmp_path, log=both)
        trainer.callbacks.append(callback)
        with pytest.raises(ends_by):
            trainer.fit()
    build(tmp_path, log=both).fit()
    assert [record["step"] for record in read_jsonl(tmp_path / "evaluations.jsonl")] == EVALUATED
    assert tensorboard_steps(tmp_path / "tensorboard", "evaluation/loss") == EVALUATED
    assert evaluated_in_wandb(tmp_path) == EVALUATED


def test_tensorboard_forgets_a_run_that_left_nothing_to_go_on_from(tmp_path):
    for steps in ([1, 2, 3], [1, 2]):
        logger = TensorBoardLogger(tmp_path)
        logger.start(0, 10, resumed=False)
        logger.log([{"step": step, "loss": 0.5, "loss_hex": "0x1p-1"} for step in steps])
        logger.close()
    assert tensorboard_steps(tmp_path / "tensorboard", "train/loss") == [1, 2]


def test_a_missing_tensorboard_is_one_line_that_says_how_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(UserError, match=r"log.tensorboard=true: .*pip install 'tputrain\[tensorboard\]'"):
        TensorBoardLogger(tmp_path).start(0, 1, resumed=False)


def wandb_rows(path: Path) -> list[dict]:
    """The rows in a run written offline: LevelDB's log format around wandb's protocol buffers."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, block, place = path.read_bytes(), 32 * 1024, 7  # 7: the file's header
    rows, pending = [], b""
    while place + 7 <= len(content):
        if block - place % block < 7:  # no room for a record's header: the block is filled up
            place += block - place % block
            continue
        length, kind = struct.unpack("<HB", content[place + 4 : place + 7])
        if kind == 0:
            break
        pending += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            record, pending = Record.FromString(pending), b""
            if record.HasField("history"):
                items = record.history.item
                row = {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items}
                rows.append(row | {"step": record.history.step.num})
    return rows


def evaluated_in_wandb(run_dir: Path) -> list[int]:
    import wandb

    wandb.teardown()  # its own process may still be writing
    (file,) = (run_dir / "wandb").glob("offline-run-*/*.wandb")
    return [row["evaluation/step"] for row in wandb_rows(file) if "evaluation/loss" in row]


def test_wandb_offline_holds_the_whole_run_once_after_sigkill_and_resume(tmp_path, capsys):
    run_until_killed(tmp_path, "wandb", "kill-step", 11)
    run_id = json.loads((tmp_path / ID_FILE).read_text())["id"]
    (killed,) = (tmp_path / "wandb").glob("offline-run-*")
    build(tmp_path, log=log_config("wandb")).fit()
    assert json.loads((tmp_path / ID_FILE).read_text())["id"] == run_id
    (directory,) = (tmp_path / "wandb").glob("offline-run-*")
    assert directory != killed
    assert f"wandb sync {directory}" in capsys.readouterr().out
    assert evaluated_in_wandb(tmp_path) == EVALUATED
    rows = wandb_rows(directory / f"run-{run_id}.wandb")
    assert [row["step"] for row in rows] == list(range(STEPS + 1))
    assert [row["step"] for row in rows if "train/loss" in row] == list(range(1, STEPS + 1))


class Server:
    """Stands for a run at Weights & Biases: rows by step, those before the newest closed for ever."""

    def __init__(self) -> None:
        self.rows: dict[int, dict] = {}
        self.dir = "elsewhere/files"

    @property
    def step(self) -> int:
        return max(self.rows, default=-1) + 1

    @property
    def summary(self) -> dict:
        return {name: value for row in self.rows.values() for name, value in row.items()}

    def define_metric(self, name: str, step_metric: str) -> None:
        assert (name, step_metric) == ("evaluation/*", "evaluation/step")

    def log(self, values: dict, step: int) -> None:
        assert step >= max(self.rows, default=-1), "wandb drops what comes late"
        assert not self.rows.get(step, {}).keys() & values.keys(), "logged twice"
        self.rows.setdefault(step, {}).update(values)

    def finish(self) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    import wandb

    server = Server()
    monkeypatch.setattr(wandb, "init", lambda **settings: server)
    monkeypatch.setattr("tputrain.loggers.wandb.why_unreachable", lambda url: None)
    return server


def online() -> LogConfig:
    return LogConfig(every=5, progress="none", wandb=WandbConfig(mode="online"))


def steps_with(server: Server, name: str) -> list[int]:
    return [step for step, row in sorted(server.rows.items()) if name in row]


@pytest.mark.parametrize("received", [0, 1, 7, 10])
def test_wandb_online_has_each_step_once_however_much_it_had_received(tmp_path, server, received):
    trainer = build(tmp_path, log=online())
    trainer.callbacks.append(CrashesAt(11))
    with pytest.raises(KeyboardInterrupt):
        trainer.fit()
    assert steps_with(server, "train/loss") == list(range(1, 11))
    server.rows = {
        step: row for step, row in server.rows.items() if step < received
    }  # the rest was under way
    build(tmp_path, log=online()).fit()  # goes on from step 9
    assert steps_with(server, "train/loss") == list(range(1, STEPS + 1))
    rows = sorted(server.rows.items())
    assert [row["evaluation/step"] for _, row in rows if "evaluation/loss" in row] == EVALUATED


def test_an_evaluation_after_a_resume_is_added_to_the_next_row(tmp_path, server):
    server.rows = {step: {"train/loss": 1.0} for step in range(1, 9)}
    (tmp_path / ID_FILE).write_text('{"id": "abc"}')
    logger = WandbLogger(WandbConfig(mode="online"), tmp_path, {})
    logger.start(8, 20, resumed=True)
    logger.log_evaluation({"step": 8, "loss": 0.5})
    logger.log([{"step": 9, "loss": 0.25}])
    assert server.rows[9] == {"evaluation/loss": 0.5, "evaluation/step": 8, "train/loss": 0.25}


@pytest.mark.parametrize("can_rewind", [True, False])
def test_wandb_takes_back_the_rows_that_a_rollback_undid_or_says_that_it_cannot(
    tmp_path, server, monkeypatch, capsys, can_rewind
):
    import wandb

    def init(**settings: object) -> Server:
        if place := settings.get("resume_from"):
            if not can_rewind:
                raise wandb.Error("no such feature\nhere")
            assert not settings.keys() & {"id", "resume"}, "wandb refuses them together"
            last = int(str(place).rpartition("?_step=")[2])
            server.rows = {step: row for step, row in server.rows.items() if step <= last}
        return server

    monkeypatch.setattr(wandb, "init", init)
    (tmp_path / ID_FILE).write_text('{"id": "abc"}')
    logger = WandbLogger(WandbConfig(mode="online"), tmp_path, {})
    logger.start(0, 20, resumed=True)
    logger.log([{"step": step, "loss": 1.0} for step in range(1, 9)])
    logger.close()
    logger.start(4, 20, resumed=True)
    logger.log([{"step": step, "loss": 2.0} for step in range(5, 11)])
    losses = [server.rows[step]["train/loss"] for step in range(1, 11)]
    assert losses == ([1.0] * 4 + [2.0] * 6 if can_rewind else [1.0] * 8 + [2.0] * 2)
    said = "steps 5 to 8 were undone, and the server keeps their rows (no such feature)"
    assert (said in capsys.readouterr().out) == (not can_rewind)


def test_wandb_without_a_network_is_offline_and_says_so(tmp_path, monkeypatch, capsys):
    from tputrain.loggers import wandb as ours

    def refuse(address: tuple[str, int], timeout: float) -> None:
        assert address == ("wandb.invalid", 8080)
        raise OSError("no route to host")

    settings = SimpleNamespace(settings=SimpleNamespace(base_url="http://wandb.invalid:8080"))
    monkeypatch.setattr("wandb.setup", lambda: settings)
    monkeypatch.setattr("tputrain.reachable.getproxies", dict)
    monkeypatch.setattr("socket.create_connection", refuse)
    assert ours._mode("online") == "offline"
    said = capsys.readouterr().out
    assert said == "wandb: wandb.invalid cannot be reached (no route to host); this process logs offline\n"


def test_wandb_refusing_a_run_is_one_line(tmp_path, monkeypatch):
    import wandb

    def refuse(**settings: object) -> None:
        raise wandb.errors.UsageError("No API key configured.\nUse `wandb login`")

    monkeypatch.setattr(wandb, "init", refuse)
    monkeypatch.setattr("tputrain.loggers.wandb.why_unreachable", lambda url: None)
    with pytest.raises(UserError, match=r"log.wandb.mode=online: No API key configured.; log in") as caught:
        WandbLogger(WandbConfig(mode="online"), tmp_path, {}).start(0, 1, resumed=False)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["tensorboard", "wandb"])
def test_a_logger_that_writes_needs_a_run_directory(kind):
    *_, logger = build_loggers(log_config(kind), None, {})
    with pytest.raises(UserError, match=rf"log.{kind}.*: no run_dir was given"):
        logger.start(0, 1, resumed=False)


def test_they_are_off_by_default(tmp_path):
    kinds = [type(logger).__name__ for logger in build_loggers(LogConfig(), tmp_path, {})]
    assert kinds == ["PlainLogger", "JsonlLogger"]
    with pytest.raises(
        UserError, match=r"log.wandb.mode=on: expected one of off, online, offline; did you mean"
    ):
        WandbConfig(mode="on")


if __name__ == "__main__":
    from tests.tputrain.resumable_run import SignalAt

    directory, chosen, moment, step = sys.argv[1:]
    build(directory, SignalAt(moment, int(step)), log=log_config(chosen)).fit()
