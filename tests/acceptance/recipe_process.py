"""A recipe run by the command line in a directory of its own: started, watched, killed, started again."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

Record = dict[str, Any]
LONGEST_SILENCE = 900.0  # seconds without a word, after which a run counts as hanging


class RecipeRun:
    """The run that one command makes in `directory`, over as many processes as it takes."""

    def __init__(self, directory: Path, recipe: Path, overrides: Sequence[str]):
        self.directory = directory
        self.run_dir = directory / "runs" / recipe.stem
        self.arguments = [str(recipe), *overrides]
        self.num_processes = 0

    def start(self) -> "RecipeProcess":
        """The same command each time: what it finds in the directory decides where it goes on."""
        self.directory.mkdir(parents=True, exist_ok=True)
        self.num_processes += 1
        return RecipeProcess(self, self.directory / f"output-{self.num_processes}.txt")

    def finish(self) -> "RecipeProcess":
        """Run to the end. Raises SystemExit with the last lines of its output where it fails."""
        process = self.start()
        process.wait_for(lambda: False)
        return process

    def steps(self) -> list[Record]:
        """What was logged for each step."""
        return read_records(self.run_dir / "metrics.jsonl")

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

    def __init__(self, run: RecipeRun, output: Path):
        self.run = run
        self.output_path = output
        self.started_at = time.time()
        with output.open("w") as stream:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tputrain.cli", "run", *run.arguments],
                cwd=run.directory,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def output(self) -> str:
        return self.output_path.read_text(errors="replace")

    def resumed_at(self) -> int | None:
        """The step that this process went on from; None where it began at the beginning."""
        match = re.search(r"^resumed from .* at step (\d+)", self.output(), re.MULTILINE)
        return int(match[1]) if match else None

    def trains(self) -> bool:
        """Whether its first step is done: from here on the metrics are its own, not an earlier process's."""
        return re.search(r"first of this process, .* s$", self.output(), re.MULTILINE) is not None

    def evaluates(self) -> bool:
        """Whether its last word is that an evaluation has begun."""
        return re.search(r"evaluating at step \d+ \.\.\. $", self.output()) is not None

    def saves(self) -> bool:
        """Whether a checkpoint lies unfinished, and not since an earlier process was killed."""
        unfinished = (self.run.run_dir / "checkpoints").glob(".unfinished-step-*")
        return any(_modified_at(path) >= self.started_at for path in unfinished)

    def has_reached(self, step: int) -> bool:
        """Whether its metrics have come to `step`."""
        return self.trains() and self.run.steps()[-1]["step"] >= step

    def wait_for(self, condition: Callable[[], bool], poll_seconds: float = 0.1) -> bool:
        """Wait until `condition` holds (True) or the process ends (False).

        Raises SystemExit where the process fails or hangs; it does not outlive this one.
        """
        try:
            while not condition():
                code = self.process.poll()
                if code == 0:
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

    def _complaint(self, what: str) -> str:
        last = "".join(f"\n  {line}" for line in self.output().splitlines()[-20:])
        return f"the run in {self.run.directory} {what}; it ended with:{last}"


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
