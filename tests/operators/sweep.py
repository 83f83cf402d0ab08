"""Measure entries in a process of their own, so that a crash or a hang costs one entry and not the sweep.

    python -m tests.operators.sweep [--database op_db] [--dtype float32] [--only NAME] [--part i/n] [--rows F]

Rows go to the file as they come; entries that it has are not measured again, so a broken sweep is taken up
where it stopped. Prints the failures, and a table by database and dtype.
"""

from __future__ import annotations

import argparse
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.operators.database import DATABASES, DTYPES, Entry, entries
from tests.operators.outcome import Outcome, Row, row_of
from tests.operators.table import table

# XLA optimises programs that will run once as little as it can, by its older emitters, which changes last
# digits at most. Without FMA a product is rounded before it is added to, as in most of PyTorch's CPU kernels:
# where a sample cancels (asin close to 1) the difference is beyond the tolerance. docs/operators.md says so.
XLA_FLAGS = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true --xla_cpu_max_isa=AVX"
    " --xla_cpu_use_fusion_emitters=false"
)

# A process keeps every program it compiled.
_ENTRIES_A_PROCESS = 120


class Worker:
    """A process that measures one entry after another, within a time limit each."""

    def __init__(self, limit: float, most_samples: int | None = None):
        self._limit = limit
        self._options = [] if most_samples is None else [str(most_samples)]
        self._process: subprocess.Popen[str] | None = None
        self._served = 0

    def measure(self, entry: Entry) -> Row:
        if self._process is None or self._served >= _ENTRIES_A_PROCESS:
            self._start()
        assert self._process is not None
        assert self._process.stdin is not None
        start = time.monotonic()
        self._served += 1
        self._process.stdin.write(entry.key + "\n")
        self._process.stdin.flush()
        line = self._read_line(self._limit)
        if line:
            return Row.from_json(line)
        outcome = Outcome()
        if self._process.poll() is None:
            outcome.fail("all", f"not done after {self._limit:.0f} s")
        else:
            outcome.fail("all", f"the process died with exit code {self._process.returncode}")
        self.stop()
        return row_of(entry, outcome, {}, time.monotonic() - start)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _start(self) -> None:
        self.stop()
        environment = {
            "TPU_CACHE_DIR": "none",
            **os.environ,
            "XLA_FLAGS": os.environ.get("XLA_FLAGS", XLA_FLAGS),
            "OMP_NUM_THREADS": "1",
        }
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "tests.operators.worker", *self._options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )
        self._served = 0
        if self._read_line(300) != "ready\n":
            self.stop()
            raise RuntimeError("the measuring process does not start: try python -m tests.operators.worker")

    def _read_line(self, seconds: float) -> str:
        """The next line, empty where none comes in time or the process has ended."""
        assert self._process is not None
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            if not selector.select(seconds):
                return ""
        line = self._process.stdout.readline()
        if not line:
            self._process.wait(30)
        return line


def read_rows(path: Path) -> list[Row]:
    return [Row.from_json(line) for line in path.read_text().splitlines()] if path.exists() else []


def sweep(
    wanted: Sequence[Entry], rows_file: Path | None, limit: float, seconds: float, most_samples: int | None
) -> list[Row]:
    """Measure what ``rows_file`` lacks, beginning nothing after ``seconds``; the rows of ``wanted``."""
    done = {row.entry: row for row in (read_rows(rows_file) if rows_file else [])}
    worker = Worker(limit, most_samples)
    end = time.monotonic() + seconds
    try:
        for entry in wanted:
            if entry in done or time.monotonic() > end:
                continue
            row = done[entry] = worker.measure(entry)
            if not row.passed:
                print(f"FAIL {entry.key}: {row.failure} (+{row.failures - 1})", flush=True)
            if rows_file is not None:
                with rows_file.open("a") as file:
                    print(row.to_json(), file=file)
    finally:
        worker.stop()
    return [done[entry] for entry in wanted if entry in done]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--database", choices=(*DATABASES, "all"), default="op_db")
    parser.add_argument("--dtype", choices=(*DTYPES, "all"), default="float32")
    parser.add_argument("--only", default="", help="entries whose name contains this")
    parser.add_argument("--part", default="0/1", help="i/n: every n-th entry, from the i-th")
    parser.add_argument(
        "--rows", type=Path, help="JSON rows, one an entry; what is there is not measured again"
    )
    parser.add_argument("--limit", type=float, default=120, help="seconds for one entry")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no entry after this time")
    parser.add_argument(
        "--samples", type=int, help="a quick look at this many samples an operator: no measurement"
    )
    options = parser.parse_args(arguments)
    part, parts = (int(number) for number in options.part.split("/"))
    wanted = [
        entry
        for database in (DATABASES if options.database == "all" else [options.database])
        for dtype in (DTYPES if options.dtype == "all" else [options.dtype])
        for entry in entries(database, dtype)[part::parts]
        if options.only in entry.name
    ]
    start = time.monotonic()
    rows = sweep(wanted, options.rows, options.limit, options.seconds, options.samples)
    print(table(rows))
    if len(rows) < len(wanted):
        print(f"{len(wanted) - len(rows)} of {len(wanted)} entries are not measured yet")
    print(f"{time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
