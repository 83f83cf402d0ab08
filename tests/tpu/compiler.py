"""Compiles calls in batches, and finds in a batch that fails the calls that are at fault."""

from __future__ import annotations

import json
import os
import pickle
import re
import select
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.backend.fresh_process import PYTHONPATH, ROOT
from tests.tpu.call import Call
from tests.tpu.chips import ENVIRONMENT

BATCH = 24
LIFETIME = 24  # batches: the compiler gives no memory back, some 12 GB after 90 of them
TIME_LIMIT = 400  # seconds a batch; what alone takes longer counts as a failure


class Compiler:
    """The TPU compiler, in a process that is started again when the compiler aborts it."""

    def __init__(self, calls: Sequence[Call]):
        self._folder = tempfile.TemporaryDirectory()
        self._calls_file = Path(self._folder.name) / "calls.pickle"
        self._calls_file.write_bytes(pickle.dumps(list(calls)))
        self._log = Path(self._folder.name) / "stderr"
        self._process: subprocess.Popen[str] | None = None
        self._num_compiled = 0  # by this process

    def __enter__(self) -> Compiler:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop()
        self._folder.cleanup()

    def problems(self, positions: Sequence[int], chip: str) -> Iterator[tuple[int, str | None]]:
        """Each call's position with None, or with what the compiler says about it for this chip."""
        problem = self._compile(positions, chip)
        if problem is None or len(positions) == 1:
            yield from ((position, problem) for position in positions)
            return
        half = len(positions) // 2
        yield from self.problems(positions[:half], chip)
        yield from self.problems(positions[half:], chip)

    def _compile(self, positions: Sequence[int], chip: str) -> str | None:
        if self._num_compiled == LIFETIME:
            self._stop()
        if self._process is None:
            self._process = self._start()
            self._num_compiled = 0
        self._num_compiled += 1
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps([chip, list(positions)]) + "\n")
        process.stdin.flush()
        in_time, _, _ = select.select([process.stdout], [], [], TIME_LIMIT)
        if not in_time:
            process.kill()
            self._stop()
            return f"takes longer than {TIME_LIMIT} s"
        answer = process.stdout.readline()
        if answer:
            return json.loads(answer)
        self._stop()
        return f"aborts the process: {self._last_words()}"

    def _start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.tpu.compile_worker", str(self._calls_file)],
            env={**os.environ, **ENVIRONMENT, "PYTHONPATH": PYTHONPATH},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log.open("w"),
            text=True,
            cwd=ROOT,
        )

    def _stop(self) -> None:
        if self._process is None:
            return
        self._process.communicate()
        self._process = None

    def _last_words(self) -> str:
        """The compiler's fatal line, or the exception that ended the worker."""
        lines = self._log.read_text(errors="replace").splitlines()
        fatal = [line for line in lines if re.match(r"F\d{4} ", line)] or lines[-1:]
        return fatal[0].partition("] ")[2] or fatal[0] if fatal else "without a word"
