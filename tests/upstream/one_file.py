"""Runs a file of PyTorch's distributed tests, as it is, on ranks that are processes, with the backend "tpu".

    python -m tests.upstream.one_file FILE WORLD_SIZE ROWS [--stands-for gloo] [--only TEST ...]

FILE is looked for in PYTORCH_TESTS, PyTorch's own test directory, if that is set, and else in the installed
torch (`torch/testing/_internal/distributed`). A row of ROWS is a test: its file, ranks, what the backend
stands for, its outcome, why and seconds. Ranks go on from test to test, and start anew after one that failed.

The backend "tpu" stands for "nccl", or for "gloo". PyTorch skips other tests for the one than for the other.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from queue import Empty, Queue
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_START = 120.0  # seconds in which ranks import torch and the file
_GRACE = 6.0  # seconds for the other ranks, when one has failed


def find(file: str) -> Path:
    """Where a test file is. Raises FileNotFoundError with the places that were looked at."""
    import importlib.util

    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    folders = [Path(spec.origin).parent / "testing/_internal/distributed"]
    if "PYTORCH_TESTS" in os.environ:
        folders.insert(0, Path(os.environ["PYTORCH_TESTS"]))
    for folder in folders:
        if (path := folder / file).is_file():
            return path.resolve()
    raise FileNotFoundError(f"{file} is in none of {', '.join(map(str, folders))}: set PYTORCH_TESTS")


class Ranks:
    """The processes of one world, which run test after test."""

    def __init__(self, file: Path, world_size: int, stands_for: str, log: Any):
        self.directory = Path(tempfile.mkdtemp(prefix="upstream-"))
        for name in ("barrier", "test_dir", "init_dir"):
            (self.directory / name).mkdir()
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("TPU_")}
        environment = {
            **inherited,
            "PYTHONPATH": os.pathsep.join([str(ROOT / "backend"), str(ROOT)]),
            "OMP_NUM_THREADS": "1",
            "TPU_CACHE_DIR": "none",
            "BACKEND": stands_for,
            "WORLD_SIZE": str(world_size),
            "TEMP_DIR": str(self.directory),
            "INIT_METHOD": f"file://{self.directory}/init_dir/shared_init_file",
            "MASTER_ADDR": "127.0.0.1",
        }
        command = [sys.executable, "-W", "ignore", "-m", "tests.upstream.rank"]
        self.processes = [
            subprocess.Popen(
                [*command, str(file), str(world_size), str(rank), str(self.directory)],
                env=environment,
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
            for rank in range(world_size)
        ]
        self.lines: list[Queue[Any]] = [Queue() for _ in self.processes]
        for process, lines in zip(self.processes, self.lines, strict=True):
            threading.Thread(target=self._read, args=(process, lines), daemon=True).start()
        self.tests: list[str] = []
        for each in self._answers(_START):
            if not isinstance(each, list):
                self.end()
                raise RuntimeError(f"{file}: a rank did not come to its tests: {each}; see the log")
            self.tests = each

    @staticmethod
    def _read(process: subprocess.Popen[str], lines: Queue[Any]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.put(json.loads(line))
        lines.put(None)

    def _answers(self, seconds: float) -> list[Any]:
        """One a rank: what it says next, or a failure."""
        deadline = time.monotonic() + seconds
        answers: dict[int, Any] = {}
        while len(answers) < len(self.processes):
            for rank, lines in enumerate(self.lines):
                if rank in answers:
                    continue
                try:
                    answers[rank] = lines.get(timeout=0.02)
                except Empty:
                    if time.monotonic() <= deadline:
                        continue
                    answers[rank] = {"outcome": "failed", "why": f"not done after {seconds:.0f} s"}
                if answers[rank] is None:
                    code = self.processes[rank].wait()
                    answers[rank] = {"outcome": "failed", "why": f"the process ended with {code}"}
                is_well = isinstance(answers[rank], list) or answers[rank]["outcome"] != "failed"
                if not is_well:
                    deadline = min(deadline, time.monotonic() + _GRACE)
        return [answers[rank] for rank in range(len(self.processes))]

    def run(self, test: str, number: int, seconds: float) -> tuple[dict[str, Any], bool]:
        """The row of a test, and whether the ranks can go on."""
        began = time.monotonic()
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps({"test": test, "number": number}) + "\n")
            process.stdin.flush()
        answers = self._answers(seconds)
        order = ("failed", "skipped", "passed")
        worst = min(order.index(each["outcome"]) for each in answers)
        found = [(rank, each) for rank, each in enumerate(answers) if order.index(each["outcome"]) == worst]
        # Of those that failed, the one that failed first says why; the others say that it failed.
        rank, first = min(found, key=lambda each: each[1].get("seconds", 1e9))
        why = f"rank {rank}: {first['why']}" if first["outcome"] == "failed" else first["why"]
        row = {
            "test": test,
            "outcome": first["outcome"],
            "why": why,
            "seconds": round(time.monotonic() - began, 1),
        }
        return row, all(each.get("is_clean", False) for each in answers)

    def end(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()
        shutil.rmtree(self.directory, ignore_errors=True)


def run_file(
    file: str,
    world_size: int,
    only: Sequence[str] = (),
    seconds: float = 120,
    stands_for: str = "nccl",
    log: Any = subprocess.DEVNULL,
) -> Iterator[dict[str, Any]]:
    """The rows of a file's tests, as they end; of those with these names only, if there are any."""
    path = find(file)
    ranks: Ranks | None
    ranks = Ranks(path, world_size, stands_for, log)
    tests = [test for test in ranks.tests if not only or test.partition(".")[2] in only]
    try:
        for number, test in enumerate(tests):
            if ranks is None:
                ranks = Ranks(path, world_size, stands_for, log)
            row, can_go_on = ranks.run(test, number, seconds)
            yield {"file": file, "ranks": world_size, "stands_for": stands_for, **row}
            if not can_go_on:
                ranks.end()
                ranks = None
    finally:
        if ranks is not None:
            ranks.end()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file")
    parser.add_argument("world_size", type=int)
    parser.add_argument("rows", type=Path)
    parser.add_argument("--stands-for", default="nccl", choices=["nccl", "gloo"])
    parser.add_argument("--only", nargs="+", default=[], help="names of tests")
    parser.add_argument("--seconds", type=float, default=120, help="that a test may take")
    asked = parser.parse_args()
    counts: dict[str, int] = {}
    with asked.rows.open("w") as rows, asked.rows.with_suffix(".log").open("w") as log:
        for row in run_file(asked.file, asked.world_size, asked.only, asked.seconds, asked.stands_for, log):
            counts[row["outcome"]] = counts.get(row["outcome"], 0) + 1
            print(json.dumps(row), file=rows, flush=True)
            print(f"{row['outcome']:8}{row['seconds']:6.1f} s  {row['test']}  {row['why']}", flush=True)
    print(counts)


if __name__ == "__main__":
    main()
