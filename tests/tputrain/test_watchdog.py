"""A run that hangs is ended and says where; one that is slow, but alive, is left alone."""

import errno
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.tputrain.hanging_run import HANGS_AT
from tests.tputrain.resumable_run import STEPS, build
from tpu_backend.distributed.peers import Awaited
from tputrain import RunConfig, UserError
from tputrain import device as devices
from tputrain.callbacks.callback import Callback
from tputrain.hang_report import report_hang
from tputrain.heartbeat import ENDED, read_heartbeat
from tputrain.watchdog import DATA, EVALUATING, FIRST_STEP, READING, STEP, Watchdog, WatchdogConfig

ROOT = Path(__file__).resolve().parents[2]


def run_until_ended(run_dir: Path, where: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "tests.tputrain.hanging_run", str(run_dir), where]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)


@pytest.mark.parametrize(("where", "phase"), [("step", STEP), ("data", DATA)])
def test_a_run_that_hangs_in_c_ends_and_names_the_file_with_its_stacks(tmp_path, where, phase):
    ended = run_until_ended(tmp_path, where)
    assert ended.returncode == 1, ended.stderr
    (stacks,) = tmp_path.glob("hang-*.txt")
    assert str(stacks) in ended.stderr
    assert f"hangs at step {HANGS_AT - 1} in phase {phase!r}" in ended.stderr
    text = stacks.read_text()
    assert "hanging_run.py" in text
    assert " in hang" in text
    if where == "step":  # on tpu: the optimizer's operations are launched, or wait for the next step
        assert "the last operations on tpu, oldest first:\n  " in text
        assert re.search(r"\n  (launched|waiting )  aten::\w+(\.\w+)?\(.*float32\[2, 4\]", text), text
    assert read_heartbeat(tmp_path)["phase"] == phase


def test_a_run_that_hangs_with_the_interpreter_s_lock_held_ends_too(tmp_path):
    ended = run_until_ended(tmp_path, "interpreter")
    assert ended.returncode == 1, ended.stderr
    assert " in hang" in ended.stderr  # no Python thread could write a file


def test_on_a_full_disk_the_stacks_of_a_hang_go_to_standard_error(tmp_path, monkeypatch, capfd):
    write = os.write

    def full(descriptor: int, data: bytes) -> int:
        if descriptor != 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", full)
    assert report_hang(tmp_path, torch.device("cpu"), "it hangs") == "it hangs"
    said = capfd.readouterr().err
    assert "the stacks cannot be written there (No space left on device); they follow\n" in said
    assert " in test_on_a_full_disk" in said


class Ended(BaseException):
    """Stands for os._exit."""


@pytest.fixture
def watchdog(tmp_path, monkeypatch) -> Watchdog:
    """One whose clock is moved by `look`, for a run at step 20."""
    monkeypatch.setattr("tputrain.watchdog.faulthandler.dump_traceback_later", lambda *_, **__: None)

    def leave(code: int) -> None:
        raise Ended(code)

    monkeypatch.setattr(os, "_exit", leave)
    cfg = WatchdogConfig(step_seconds=60.0, wait_seconds=600.0, setup_seconds=3600.0)
    return Watchdog(cfg, tmp_path, torch.device("cpu"), lambda: 20)


def records(step: int, seconds: float, compilations: int = 0) -> list[dict]:
    return [{"step": step, "step_seconds": seconds, "compilations": compilations}]


def test_steps_are_given_much_time_until_their_time_is_known_and_then_little(watchdog):
    assert watchdog.limit(STEP) == watchdog.limit(FIRST_STEP) == watchdog.limit(READING) == 3600.0
    watchdog.learn(records(10, 90.0), is_first_step=True)
    assert watchdog.limit(FIRST_STEP) == 3600.0
    watchdog.learn(records(10, 95.0, compilations=1))
    assert watchdog.limit(READING) == 3600.0
    watchdog.learn(records(18, 3.0))
    # Two steps were dispatched since then, and one may be under way.
    assert watchdog.limit(STEP) == watchdog.limit(READING) == 2 * 3 * 3.0 + 60.0


def test_a_wait_that_is_longer_than_any_before_is_told_of_once(watchdog, capfd):
    with watchdog.phase(DATA):
        watchdog.look(9.0)
        assert capfd.readouterr().err == ""
        watchdog.look(3.0)
        watchdog.look(9.0)
    assert capfd.readouterr().err == "\nstep 21: waiting for data, 12 s so far\n"
    with watchdog.phase(DATA):
        watchdog.look(30.0)  # as slow as before: nothing new
    with watchdog.phase(EVALUATING):
        watchdog.look(300.0)  # announced when it began
    assert capfd.readouterr().err == ""


def test_a_hang_is_noticed_at_most_a_minute_past_what_is_expected(watchdog, capfd):
    watchdog.learn(records(20, 2.0))
    with watchdog.phase(STEP):
        for _ in range(64):
            watchdog.look(1.0)
        with pytest.raises(Ended):
            watchdog.look(1.0)
    assert "hangs at step 20 in phase 'step': 65.0 s, expected at most 64.0 s" in capfd.readouterr().err


@pytest.mark.parametrize("name", [DATA, EVALUATING, "saving", "callbacks, on_log"])
def test_other_phases_may_take_long_and_longer_where_they_did_before(watchdog, name):
    watchdog.learn(records(20, 0.1))
    assert watchdog.limit(name) == 3600.0
    with watchdog.phase(name):
        watchdog.look(900.0)
    assert watchdog.limit(name) == 2 * 900.0 + 600.0
    with watchdog.phase(name):
        watchdog.look(2400.0)
        with pytest.raises(Ended):
            watchdog.look(1.0)


def test_a_phase_that_gives_signs_of_life_may_take_any_time(watchdog):
    with watchdog.phase(EVALUATING):
        watchdog.look(1.0)
    with watchdog.phase(EVALUATING):
        for _ in range(20):
            watchdog.look(500.0)
            watchdog.go_on()


def test_a_step_that_compiles_anew_is_given_the_time_for_that(watchdog, monkeypatch):
    watchdog.learn(records(20, 0.1))
    monkeypatch.setattr(devices, "is_compiling", lambda device: True)
    with watchdog.phase(STEP):
        watchdog.look(3600.0)
        with pytest.raises(Ended):
            watchdog.look(1.0)


def test_a_compilation_is_seen_while_it_lasts(monkeypatch):
    from tpu_backend.runtime import compiler

    seen: list[bool] = []
    lower = compiler.lower_segment
    tpu = torch.device("tpu")

    def watched(*arguments):
        seen.append(devices.is_compiling(tpu))
        return lower(*arguments)

    monkeypatch.setattr(compiler, "lower_segment", watched)
    before = devices.compilations(tpu)
    (torch.ones(3, 17, device=tpu) * 1.0625).cos().sum().item()  # a form that no other test compiles
    assert devices.compilations(tpu) == before + len(seen)
    assert seen
    assert all(seen)
    assert not devices.is_compiling(tpu)


def test_nobody_is_hurried_who_debugs(watchdog, monkeypatch):
    watchdog.learn(records(20, 0.1))
    scope = {"__name__": "pdb", "watchdog": watchdog}
    exec("def prompt():\n    watchdog.look(9999.0)\n", scope)
    with watchdog.phase(STEP):
        scope["prompt"]()
        with pytest.raises(Ended):
            watchdog.look(1.0)


def test_switched_off_nothing_is_ended(watchdog):
    off = Watchdog(WatchdogConfig(enabled=False), None, torch.device("cpu"), lambda: 0)
    off.look(1e9)


def test_the_heartbeat_says_what_a_run_does_and_how_it_ended(tmp_path):
    class Looks(Callback):
        beats: list = []  # noqa: RUF012

        def on_fit_start(self, trainer):
            self.beats.append(read_heartbeat(tmp_path))

    trainer = build(tmp_path)
    trainer.callbacks.append(Looks())
    trainer.fit()
    (first,) = Looks.beats
    assert (first["pid"], first["step"]) == (os.getpid(), 0)
    assert first["phase"] == "setting up"
    last = read_heartbeat(tmp_path)
    assert (last["step"], last["phase"]) == (STEPS, "ended")
    assert last["time"] >= first["time"]


def test_a_run_that_fails_says_so_in_its_heartbeat(tmp_path):
    class Fails(Callback):
        def on_step_end(self, trainer):
            raise UserError("no more")

    trainer = build(tmp_path)
    trainer.callbacks.append(Fails())
    with pytest.raises(UserError):
        trainer.fit()
    assert read_heartbeat(tmp_path)["phase"] == "failed"


def test_a_heartbeat_that_cannot_be_written_ends_no_run(watchdog, tmp_path):
    watchdog.run_dir = tmp_path / "gone"
    watchdog.look(100.0)
    assert read_heartbeat(tmp_path / "gone") is None


class OtherRanks:
    """What rank 0 knows of the others: they wait for `rank`, which was heard of `silent` seconds ago."""

    def __init__(self, rank: int, silent: float, doing: str = DATA):
        self.silent, self.rank, self.doing = silent, rank, doing
        self.beats: list[str] = []
        self.hangs = False

    def beat(self, doing: str) -> None:
        self.beats.append(doing)

    def awaited(self, silence: float) -> list[Awaited]:
        name = f"rank {self.rank} (process 7 on host)"
        return [Awaited(self.rank, name, "an exchange", self.doing, self.silent)]

    def declare_hang(self) -> bool:
        """Rank 0 is the first to say so, unless it is known already."""
        return not self.hangs


@pytest.fixture
def ranked(watchdog, monkeypatch) -> Watchdog:
    """The watchdog of rank 0 of several."""
    monkeypatch.setattr("tputrain.watchdog._OTHERS_WRITE", 0.0)
    watchdog.rank = 0
    watchdog.learn(records(20, 2.0))
    return watchdog


def test_a_rank_that_waits_for_a_living_one_leaves_it_to_that_ones_watchdog(ranked, monkeypatch, tmp_path):
    others = OtherRanks(rank=2, silent=1.0)
    monkeypatch.setattr(devices, "peers", lambda: others)
    with ranked.phase(READING):
        ranked.look(1000.0)
        others.silent = 30.0
        with pytest.raises(Ended):
            ranked.look(1.0)
    assert READING in others.beats


def test_a_hang_is_told_in_one_line_that_names_the_rank_that_all_wait_for(
    ranked, monkeypatch, capfd, tmp_path
):
    monkeypatch.setattr(devices, "peers", lambda: OtherRanks(rank=2, silent=30.0))
    with ranked.phase(READING), pytest.raises(Ended):
        ranked.look(65.0)
    said = capfd.readouterr().err
    assert said.count("\ntputrain: ") == 1
    assert (
        "everybody waits for rank 2 (process 7 on host), last heard of 30 s ago, "
        "in phase 'waiting for data', last in an exchange" in said
    )
    (report,) = tmp_path.glob("hang-*-rank-0.txt")
    assert str(report) in said


def test_a_rank_that_no_longer_runs_is_noticed_in_what_is_done_for_the_first_time(ranked, monkeypatch, capfd):
    others = OtherRanks(rank=2, silent=1.0)
    monkeypatch.setattr(devices, "peers", lambda: others)
    longest = ranked.cfg.wait_seconds
    with ranked.phase(EVALUATING):
        ranked.look(2 * longest)
        others.silent = longest + 1  # as after all have been suspended together
        ranked.look(1.0)
        others.silent = 1.0
        ranked.look(100.0)
        others.silent = longest + 1
        ranked.look(1.0)
        with pytest.raises(Ended):
            ranked.look(100.0)
    said = capfd.readouterr().err
    assert "in phase 'evaluating': a rank says nothing for 601 s, expected at most 600 s" in said


def test_a_rank_that_has_ended_its_training_may_be_silent(ranked, monkeypatch):
    """As one whose script goes on after `fit`, while another one closes its loggers."""
    others = OtherRanks(rank=2, silent=1000.0, doing=ENDED)
    monkeypatch.setattr(devices, "peers", lambda: others)
    with ranked.phase(EVALUATING):
        ranked.look(2 * ranked.cfg.wait_seconds)
        ranked.look(100.0)


def test_a_rank_that_is_itself_awaited_is_ended_by_its_own_watchdog(ranked, monkeypatch):
    monkeypatch.setattr(devices, "peers", lambda: OtherRanks(rank=0, silent=1.0))
    with ranked.phase(STEP), pytest.raises(Ended):
        ranked.look(65.0)


def test_a_hang_that_another_rank_has_found_is_reported_once(watchdog, monkeypatch, tmp_path, capfd):
    others = OtherRanks(rank=0, silent=1.0)
    others.hangs = True
    monkeypatch.setattr(devices, "peers", lambda: others)
    watchdog.rank = 3
    for _ in range(2):
        watchdog.look(6.0)
    (report,) = tmp_path.glob("hang-*-rank-3.txt")
    assert "another rank hangs" in report.read_text()
    assert capfd.readouterr().err == ""
    with pytest.raises(Ended):
        watchdog.look(20.0)  # nobody has ended it
    assert read_heartbeat(tmp_path, rank=3)["phase"] == "setting up"
    assert read_heartbeat(tmp_path) is None


@pytest.mark.parametrize("key", ["step_seconds", "wait_seconds", "setup_seconds", "heartbeat_seconds"])
def test_times_of_nothing_are_refused(key):
    with pytest.raises(UserError, match=f"watchdog.{key}=0: expected a number above 0"):
        RunConfig(watchdog=WatchdogConfig(**{key: 0}))
