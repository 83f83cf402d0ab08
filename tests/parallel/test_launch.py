"""`tputrain run` with `parallel.processes`: ranks start, stop together, go on, and fail in one line."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from random import choice

import pytest

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

    def __init__(self, directory: Path, name: str, *overrides: str):
        self.run_dir = directory / "runs" / name
        self.name = f"run_dir=runs/{name}"
        environment = {key: value for key, value in os.environ.items() if not key.startswith("TPU_")}
        environment |= {
            "PYTHONPATH": f"{ROOT / 'backend'}:{ROOT}",
            "TPU_CACHE_DIR": str(directory / "programs"),
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tputrain", "run", "small.yaml", self.name, *overrides],
            cwd=directory,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.said = ""

    def lines(self) -> Iterator[str]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said += line
            yield line

    def until_step(self, step: int) -> None:
        assert any(f"step {step}/" in line for line in self.lines()), self.said

    def end(self) -> int:
        """The exit code, once it has ended with all of its ranks."""
        for _ in self.lines():
            pass
        code = self.process.wait(timeout=60)
        deadline = time.monotonic() + 10
        while left := self.ranks():
            assert time.monotonic() < deadline, f"left behind: {left}\n{self.said}"
            time.sleep(0.1)
        return code

    def ranks(self) -> dict[str, int]:
        """Process ids of the ranks that live."""
        found = {}
        for process in Path("/proc").glob("[0-9]*"):
            try:
                command = (process / "cmdline").read_text().split("\0")
                environment = dict(
                    each.partition("=")[::2] for each in (process / "environ").read_text().split("\0")
                )
            except OSError:
                continue  # it has ended meanwhile
            if self.name in command and "RANK" in environment:
                found[environment["RANK"]] = int(process.name)
        return found

    def losses(self) -> list[str]:
        lines = (self.run_dir / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line)["loss_hex"] for line in lines]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("launch")
    (directory / "small.yaml").write_text(RECIPE)
    (directory / "text.txt").write_text("def add(first, second):\n    return first + second\n" * 100)
    return directory


def test_a_rank_that_is_killed_costs_nothing(directory: Path):
    """Also with a second and a last stop, each of which is asked for in another way."""
    undisturbed = Run(directory, "undisturbed")
    assert undisturbed.end() == 0, undisturbed.said
    assert "starting 2 ranks" in undisturbed.said
    assert " a chip)" in undisturbed.said

    disturbed = Run(directory, "disturbed")
    disturbed.until_step(35)
    killed = choice("01")
    os.kill(disturbed.ranks()[killed], signal.SIGKILL)
    assert any("resumed from" in line for line in disturbed.lines()), disturbed.said
    expected = (
        rf"rank {killed} failed first: Signal 9 \(SIGKILL\).*start-1/rank-{killed}\.err; "
        r"starting all ranks again from the checkpoint of step \d+ \(restart 1 of 3\)"
    )
    assert re.search(expected, disturbed.said), disturbed.said
    earlier = (disturbed.run_dir / "ranks" / "start-1" / "rank-0.out").read_text()
    assert "step 35/" in earlier
    disturbed.until_step(75)
    os.kill(disturbed.process.pid, signal.SIGINT)
    assert disturbed.end() == 130, disturbed.said
    stopped_at = len(disturbed.losses())
    assert 75 <= stopped_at < 150
    assert (disturbed.run_dir / "checkpoints" / f"step-{stopped_at}").is_dir()

    disturbed = Run(directory, "disturbed")
    disturbed.until_step(110)
    os.kill(disturbed.ranks()["1"], signal.SIGTERM)  # one rank alone is told to stop
    assert disturbed.end() == 143, disturbed.said
    assert "starting all ranks again" not in disturbed.said
    assert (disturbed.run_dir / "checkpoints" / f"step-{len(disturbed.losses())}").is_dir()

    disturbed = Run(directory, "disturbed")
    disturbed.until_step(len(undisturbed.losses()) - 20)
    os.kill(disturbed.ranks()["0"], signal.SIGKILL)
    assert disturbed.end() == 0, disturbed.said
    assert disturbed.losses() == undisturbed.losses()
    assert len(disturbed.losses()) == 150


def test_a_mistake_is_one_line_and_exit_code_2(directory: Path):
    run = Run(directory, "mistaken", "device=cpu")
    assert run.end() == 2, run.said
    expected = r"tputrain: rank [01] failed first: UserError: device=cpu: expected tpu with 2 processes"
    assert re.search(expected, run.said), run.said
