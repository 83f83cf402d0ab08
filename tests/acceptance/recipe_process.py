"""A recipe run by the command line in a directory of its own: started, watched, killed, started again."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.backend.fresh_process import PYTHONPATH
from tputrain.checkpoint.store import CheckpointStore

Record = dict[str, Any]
LONGEST_SILENCE = 900.0  # seconds without a word, after which a run counts as hanging


class RecipeRun:
    """The run that one command makes in `directory`, over as many processes as it takes."""

    def __init__(self, directory: Path, recipe: Path, overrides: Sequence[str]):
        self.directory = directory
        self.run_dir = directory / "runs" / recipe.stem
        self.arguments = ["run", str(recipe), *overrides]
        self.num_processes = 0

    def start(
        self,
        program: Sequence[str] = ("tputrain.cli",),
        environment: Mapping[str, str] | None = None,
        preexec: Callable[[], None] | None = None,
    ) -> "RecipeProcess":
        """The same command each time: what it finds in the directory decides where it goes on.

        `program`: a module that takes the command line's arguments, and arguments of its own before those.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        self.num_processes += 1
        output = self.directory / f"output-{self.num_processes}.txt"
        return RecipeProcess(self, output, program, environment, preexec)

    def finish(self) -> "RecipeProcess":
        """Run to the end. Raises SystemExit with the last lines of its output where it fails."""
        process = self.start()
        process.wait_for(lambda: False)
        return process

    @property
    def checkpoints(self) -> CheckpointStore:
        return CheckpointStore(self.run_dir / "checkpoints")

    def newest_step(self) -> int:
        """The step of the newest whole checkpoint; 0 where there is none."""
        newest = self.checkpoints.newest(lambda *_: None)
        return 0 if newest is None else int(newest.name.rpartition("-")[2])

    def steps(self) -> list[Record]:
        """What was logged for each step."""
        return read_records(self.run_dir / "metrics.jsonl")

    def last_step(self) -> int:
        """The last step that was logged; 0 where none was."""
        steps = self.steps()
        return steps[-1]["step"] if steps else 0

    def evaluations(self) -> list[Record]:
        """What was logged for each evaluation."""
        return read_records(self.run_dir / "evaluations.jsonl")

    def vocabulary_size(self) -> int:
        """As the newest checkpoint says."""
        checkpoints = (self.run_dir / "checkpoints").glob("step-*")
        newest = max(checkpoints, key=lambda path: int(path.name.removeprefix("step-")))
        return json.loads((newest / "config.json").read_text())["vocab_size"]


class RecipeProcess:
    """One process of a run."""

    def __init__(
        self,
        run: RecipeRun,
        output: Path,
        program: Sequence[str],
        environment: Mapping[str, str] | None,
        preexec: Callable[[], None] | None,
    ):
        self.run = run
        self.output_path = output
        self.started_at = time.time()
        with output.open("w") as stream:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *program, *run.arguments],
                cwd=run.directory,
                env=os.environ | {"PYTHONPATH": PYTHONPATH} | (environment or {}),
                preexec_fn=preexec,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def output(self) -> str:
        return self.output_path.read_text(errors="replace")

    def resumed_at(self) -> int | None:
        """The step that this process went on from; None where it began at the beginning."""
        return resumed_at(self.output())

    def trains(self) -> bool:
        """Whether its first step is done: from here on the metrics are its own, not an earlier process's."""
        # A signal's line may come in between.
        done = r"first of this process, .* \.\.\. (\nSIG.*\n)?[\d.]+ s$"
        return re.search(done, self.output(), re.MULTILINE) is not None

    def evaluates(self) -> bool:
        """Whether its last word is that an evaluation has begun."""
        return re.search(r"evaluating at step \d+ \.\.\.\n\Z", self.output()) is not None

    def compiles_first_step(self) -> bool:
        """Whether its last word is that the first step is being compiled."""
        return re.search(r"first of this process, .* \.\.\.\n\Z", self.output()) is not None

    def saves(self) -> bool:
        """Whether a checkpoint lies unfinished, and not since an earlier process was killed."""
        return self.step_being_saved() is not None

    def step_being_saved(self) -> int | None:
        """The step whose checkpoint it writes; None: it writes none."""
        for path in (self.run.run_dir / "checkpoints").glob(".unfinished-step-*"):
            if _modified_at(path) >= self.started_at:
                return int(path.name.rpartition("-")[2])
        return None

    def has_reached(self, step: int) -> bool:
        """Whether its metrics have come to `step`."""
        return self.trains() and self.run.last_step() >= step

    def wait_for(
        self, condition: Callable[[], bool], poll_seconds: float = 0.1, may_fail: bool = False
    ) -> bool:
        """Wait until `condition` holds (True) or the process ends (False).

        Raises SystemExit where the process hangs, or fails and may not; it does not outlive this one.
        """
        try:
            while not condition():
                code = self.process.poll()
                if code == 0 or (may_fail and code is not None):
                    return False
                if code is not None:
                    raise SystemExit(self._complaint(f"failed with exit code {code}"))
                if time.time() - _modified_at(self.output_path) > LONGEST_SILENCE:
                    raise SystemExit(self._complaint(f"has said nothing for {LONGEST_SILENCE:.0f} s"))
                time.sleep(poll_seconds)
            return True
        except BaseException:
            self.kill()
            raise

    def kill(self) -> None:
        """SIGKILL, to every process of its group: nothing can be saved or tidied up."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def last_line(self) -> str:
        """The last line it wrote, in one line."""
        lines = [line.strip() for line in self.output().replace("\r", "\n").splitlines() if line.strip()]
        return lines[-1] if lines else "nothing"

    def _complaint(self, what: str) -> str:
        last = "".join(f"\n  {line}" for line in self.output().splitlines()[-20:])
        return f"the run in {self.run.directory} {what}; it ended with:{last}"


def resumed_at(output: str) -> int | None:
    """The step that a process with this output went on from; None where it began at the beginning."""
    match = re.search(r"^resumed from .* at step (\d+)", output, re.MULTILINE)
    return int(match[1]) if match else None


def read_records(path: Path) -> list[Record]:
    """The whole lines of a JSONL file; a killed process may have left half a line at its end."""
    if not path.exists():
        return []
    lines = path.read_text().split("\n")[:-1]
    return [json.loads(line) for line in lines if line]


def _modified_at(path: Path) -> float:
    """Seconds since the epoch; 0 where the path is gone by now."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0
