"""`tputrain run` with `parallel.processes`: ranks start, stop together, go on, and fail in one line."""

import fcntl
import json
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from random import choice

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from tputrain.parallel import launch
from tputrain.parallel.config import ParallelConfig
from tputrain.parallel.launched import exit_code_of_stop

ROOT = Path(__file__).resolve().parents[2]
RECIPE = """
model:
  {name: llama-5m, vocab_size: 300, hidden_size: 16, intermediate_size: 16, num_hidden_layers: 1,
   num_attention_heads: 2, num_key_value_heads: 1, head_dim: 8}
data: {files: text.txt, vocab_size: 280, sequence_length: 16, cache_dir: cache}
batch: {tokens: 64, sequences: 4}
trainer: {steps: 150, evaluate_every: null, evaluate_batches: 2}
checkpoint: {every: 10}
log: {every: 1}
sample: {max_new_tokens: 0}
parallel: {shard: -1, processes: 2}
"""


class Run:
    """The command, in a directory of its own."""

    def __init__(self, directory: Path, name: str, *overrides: str, terminal: bool = False):
        self.run_dir = directory / "runs" / name
        self.name = f"run_dir=runs/{name}"
        self.mark = f"TPU_CACHE_DIR={directory / 'programs'}"
        environment = {key: value for key, value in os.environ.items() if not key.startswith("TPU_")}
        environment["PYTHONPATH"] = f"{ROOT / 'backend'}:{ROOT}"
        environment["TPU_CACHE_DIR"] = self.mark.partition("=")[2]
        # Ours and theirs; a terminal is written to as well.
        self.keyboard, theirs = pty.openpty() if terminal else os.pipe()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tputrain", "run", "small.yaml", self.name, *overrides],
            cwd=directory,
            env=environment,
            stdin=theirs if terminal else subprocess.DEVNULL,
            stdout=theirs,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=(lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0)) if terminal else None,
        )
        os.close(theirs)
        self._output = os.fdopen(self.keyboard, errors="replace")
        self.said = ""

    def lines(self) -> Iterator[str]:
        with suppress(OSError):  # a terminal's end, when nobody has it open any more
            for line in self._output:
                self.said += line
                yield line

    def until_step(self, step: int) -> None:
        assert any(f"step {step}/" in line for line in self.lines()), self.said

    def end(self) -> int:
        """The exit code, once it has ended with everything that it has started."""
        for _ in self.lines():
            pass
        code = self.process.wait(timeout=60)
        self.wait_for_the_rest()
        return code

    def wait_for_the_rest(self) -> None:
        deadline = time.monotonic() + 30
        while left := [*self._processes()]:
            assert time.monotonic() < deadline, f"left behind: {left}\n{self.said}"
            time.sleep(0.1)

    def ranks(self) -> dict[str, int]:
        """Process ids of the ranks that live."""
        found = {}
        for process, command, environment in self._processes():
            if self.name in command and "RANK" in environment:
                found[environment["RANK"]] = process
        return found

    def _processes(self) -> Iterator[tuple[int, list[str], dict[str, str]]]:
        for process in Path("/proc").glob("[0-9]*"):
            try:
                command = (process / "cmdline").read_text().split("\0")
                values = (process / "environ").read_text().split("\0")
            except OSError:
                continue  # it has ended meanwhile
            if self.mark in values:
                yield int(process.name), command, dict(each.partition("=")[::2] for each in values)

    def newest(self) -> int:
        return max(int(path.name[5:]) for path in (self.run_dir / "checkpoints").glob("step-*"))

    def losses(self) -> list[str]:
        lines = (self.run_dir / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line)["loss_hex"] for line in lines]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("launch")
    (directory / "small.yaml").write_text(RECIPE)
    (directory / "text.txt").write_text("def add(first, second):\n    return first + second\n" * 100)
    return directory


@pytest.fixture(scope="module")
def undisturbed(directory: Path) -> list[str]:
    run = Run(directory, "undisturbed")
    assert run.end() == 0, run.said
    assert "starting 2 ranks" in run.said
    assert " a chip)" in run.said
    assert len(run.losses()) == 150
    before = {path: path.stat().st_mtime_ns for path in run.run_dir.rglob("*")}
    again = Run(directory, "undisturbed")
    assert again.end() == 0, again.said
    assert "undisturbed is finished: it has done its 150 steps" in again.said
    assert "starting 2 ranks" not in again.said
    assert {path: path.stat().st_mtime_ns for path in run.run_dir.rglob("*")} == before
    return run.losses()


def test_a_rank_that_is_killed_has_all_started_again_and_costs_nothing(
    directory: Path, undisturbed: list[str]
):
    run = Run(directory, "killed")
    run.until_step(35)
    killed = choice("01")
    os.kill(run.ranks()[killed], signal.SIGKILL)
    assert run.end() == 0, run.said
    expected = (
        rf"rank {killed} failed first: Signal 9 \(SIGKILL\).*start-1/rank-{killed}\.err; "
        r"starting all ranks again from the checkpoint of step (\d+) \(restart 1 of 3\)"
    )
    found = re.search(expected, run.said)
    assert found is not None, run.said
    assert f"/step-{found[1]} at step {found[1]} " in run.said
    assert "step 35/" in (run.run_dir / "ranks" / "start-1" / "rank-0.out").read_text()
    # The one that was left was sent SIGTERM, and has not saved.
    assert {int(step) % 10 for step in re.findall(r"saved \S+/step-(\d+)", run.said)} == {0}
    assert run.losses() == undisturbed


def test_all_ranks_stop_together_and_are_not_started_again(directory: Path, undisturbed: list[str]):
    run = Run(directory, "stopped")
    run.until_step(15)
    os.kill(run.ranks()["1"], signal.SIGTERM)  # one rank alone is told to stop
    assert run.end() == 143, run.said
    assert "SIGTERM of rank 1: saving after this step, then leaving" in run.said
    assert (run.run_dir / "ranks" / "stopped-by").read_text() == "15"  # and ended with 0
    assert run.newest() == len(run.losses()) >= 15

    run = Run(directory, "stopped", terminal=True)
    run.until_step(40)
    assert "step 15/" in (run.run_dir / "ranks" / "start-1" / "rank-0.out").read_text()
    os.write(run.keyboard, b"\x03")
    assert run.end() == 130, run.said
    assert run.newest() == len(run.losses()) >= 40

    run = Run(directory, "stopped")
    run.until_step(65)
    run.process.kill()  # the launcher: its ranks save, and leave by themselves
    run.wait_for_the_rest()
    assert run.newest() == len(run.losses()) >= 65

    run = Run(directory, "stopped", terminal=True)
    run.until_step(90)
    for rank in run.ranks().values():
        os.kill(rank, signal.SIGSTOP)  # they cannot even take the first one
    os.write(run.keyboard, b"\x03")
    time.sleep(0.7)  # sooner it would be the first one again
    os.write(run.keyboard, b"\x03")
    asked = time.monotonic()
    assert run.end() == 130, run.said
    assert time.monotonic() - asked < 10
    assert "SIGINT again: leaving at once" in run.said
    assert "failed first" not in run.said
    losses = run.losses()
    assert losses == undisturbed[: len(losses)]


def test_a_sigterm_after_another_ranks_death_ends_a_rank_wherever_it_waits():
    waits = """
import os, signal, time
from tputrain import device
from tputrain.parallel.agreement import AgreedSignals
device.failure_of_peers = lambda seconds: "rank 1 has ended"
with AgreedSignals() as signals, signals.raised_at_the_end():
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)
"""
    began = time.monotonic()
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'backend'}:{ROOT}"}
    ended = subprocess.run([sys.executable, "-c", waits], env=environment, capture_output=True, text=True)
    assert ended.returncode == 143
    assert time.monotonic() - began < 50
    said = "SIGTERM: the launcher ends this rank, since rank 1 has ended; what was saved stays"
    assert said in ended.stderr


class Rehearsed(launch.Launcher):
    """Ranks that end as they are told to: by exit code, and steps done."""

    def __init__(self, directory: Path, *ends: tuple[int, int | None], restarts: int = 3):
        super().__init__(
            ParallelConfig(shard=2, processes=2, restarts=restarts), directory, [], [], self.saved
        )
        self.ends = list(ends)
        self.num_started = 0

    def saved(self) -> int:
        return 10

    def _run_ranks(self, arguments, signals):
        code, self.step = self.ends[self.num_started]
        self.num_started += 1
        (self._logs / "stopped-by").write_text("15" if code == 0 and self.step == 7 else "00")
        return (ProcessFailure(1, 7, code, "") if code else None), 7

    def _failed_at(self, first_pid):
        return self.step


@pytest.mark.parametrize(
    ("ends", "code", "num_started", "said"),
    [
        ([(1, 12), (1, 13), (0, None)], 0, 3, "(restart 2 of 3)"),
        ([(1, 12), (1, 13), (1, 14), (1, 15)], 1, 4, "not started again: parallel.restarts=3"),
        ([(1, 12), (1, 12)], 1, 2, "not started again: it failed after step 12 the last time, too"),
        ([(1, None), (1, None)], 1, 2, "not started again: it failed before its first step the last"),
        ([(-9, -1), (-9, -1), (0, None)], 0, 3, "from the checkpoint of step 10 (restart 2 of 3)"),
        ([(2, 12)], 2, 1, "rank 1 failed first: exit code 2; what it said: "),
        ([(143, 12)], 143, 1, ""),
        ([(-15, 12)], 143, 1, ""),
        ([(0, 7)], 143, 1, ""),
    ],
)
def test_restarts_are_bounded_and_some_failures_have_none(
    tmp_path: Path, capfd, ends: list[tuple[int, int | None]], code: int, num_started: int, said: str
):
    launcher = Rehearsed(tmp_path, *ends)
    assert launcher.run() == code
    assert launcher.num_started == num_started
    told = capfd.readouterr().err
    assert said in told if said else not told


def test_what_the_ranks_of_earlier_starts_said_is_kept_for_a_while(tmp_path: Path):
    logs = tmp_path / "ranks"
    logs.mkdir()
    for number in range(1, 13):
        (logs / "rank-0.err").write_text(str(number))
        assert Rehearsed(tmp_path, (0, 20)).run() == 0
    kept = sorted(int(path.name[6:]) for path in logs.glob("start-*"))
    assert kept == list(range(5, 13))
    assert [(logs / f"start-{each}" / "rank-0.err").read_text() for each in kept] == [*map(str, kept)]


def test_a_rank_ends_with_0_towards_an_agent_after_a_stop(monkeypatch):
    for name in ("TORCHELASTIC_RUN_ID", "TPUTRAIN_STOPPED_BY"):
        monkeypatch.delenv(name, raising=False)
    assert exit_code_of_stop(signal.SIGTERM) == 143
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "any")
    assert exit_code_of_stop(signal.SIGTERM) == 0


def test_a_mistake_is_one_line_and_exit_code_2(directory: Path):
    run = Run(directory, "mistaken", "device=cpu")
    assert run.end() == 2, run.said
    assert run.said.count("tputrain: device=cpu: expected tpu with 2 processes") == 1, run.said
    assert "UserError" not in run.said
    assert "starting all ranks again" not in run.said


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["data.files=none/*.txt"], "data.files='none/*.txt': no file matches"),
        (["model.path=none"], "model.path=none: no such directory"),
        (["data.source=saved", "data.name=none"], "data.name='none': no such directory"),
        (
            ["parallel.shard=1", "parallel.context=2", "data.sequence_length=10", "batch.tokens=80"],
            "parallel.context=2: a sequence of 10 tokens does not divide: expected a multiple of 4",
        ),
        (
            ["parallel.processes=3", "parallel.shard=1", "parallel.tensor=-1"],
            "parallel.tensor=3: model.layers.0.self_attn.q_proj has 2 heads of 8: expected",
        ),
    ],
)
def test_what_can_be_found_before_ranks_start_is(directory: Path, overrides: list[str], expected: str):
    run = Run(directory, "refused", *overrides)
    assert run.end() == 2, run.said
    assert run.said.count(expected) == 1, run.said
    assert "starting" not in run.said
