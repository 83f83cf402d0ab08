"""Numbers as JSON lines: one a step in `metrics.jsonl`, one an evaluation in `evaluations.jsonl`."""

import json
import math
import os
from pathlib import Path

from tputrain.errors import UserError
from tputrain.loggers.appended_lines import AppendedLines
from tputrain.loggers.logger import Logger, Record

STEPS = "metrics.jsonl"
EVALUATIONS = "evaluations.jsonl"
EVENTS = "events.jsonl"
"""Written by `tputrain.callbacks.events`: one line each time a process starts, saves and ends."""


class JsonlLogger(Logger):
    """Appends to the two files in `directory`. After a resume each step is there once."""

    def __init__(self, directory: Path | str):
        self.directory = Path(directory)
        self._steps: AppendedLines | None = None
        self._evaluations: AppendedLines | None = None
        self._evaluated_at = -1

    def start(self, step: int, total_steps: int | None, resumed: bool) -> None:
        last = step if resumed else -1
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._steps = _open_after(self.directory / STEPS, last)
            self._evaluations = _open_after(self.directory / EVALUATIONS, last)
        except OSError as error:
            raise UserError(
                f"{self.directory}: its logs cannot be written ({error.strerror}); make room or make it "
                "writable, and run again"
            ) from None
        self._evaluated_at = evaluated_at(self.directory)

    def log(self, records: list[Record]) -> None:
        if self._steps is not None:
            self._steps.add("".join(_line(record) for record in records))

    def log_evaluation(self, record: Record) -> None:
        if self._evaluations is not None and record["step"] > self._evaluated_at:
            self._evaluated_at = record["step"]
            self._evaluations.add(_line(record))

    def sync(self) -> None:
        for file in (self._steps, self._evaluations):
            if file is not None:
                file.sync()

    def close(self) -> None:
        for file in (self._steps, self._evaluations):
            if file is not None:
                file.close()
        self._steps = self._evaluations = None


def read_jsonl(path: Path | str) -> list[Record]:
    """All whole records of a file that a JsonlLogger wrote; a last line that was cut off is left out."""
    path = Path(path)
    if not path.exists():
        return []
    records = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue  # the process was killed in the middle of this line
        if isinstance(record, dict) and "step" in record:
            records.append(record)
    return records


def evaluated_at(directory: Path) -> int:
    """The last step whose evaluation is in `directory`; -1: there is none.

    It may be later than a checkpoint of that step knows of: one that a signal called for is written first,
    the evaluation made after the resume and, if that process is killed, made again.
    """
    return max((record["step"] for record in read_jsonl(directory / EVALUATIONS)), default=-1)


def _line(record: Record) -> str:
    # JSON has no NaN and no infinity: such a value is null here, and its hex form beside it says which it
    # was.
    finite = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in record.items()
    }
    return json.dumps(finite, allow_nan=False) + "\n"


def _open_after(path: Path, step: int) -> AppendedLines:
    """The file opened for appending, with nothing in it that comes after `step`."""
    kept = [record for record in read_jsonl(path) if record["step"] <= step]
    rewritten = path.with_name(path.name + ".new")
    with rewritten.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for record in kept)
        file.flush()
        os.fsync(file.fileno())
    os.replace(rewritten, path)
    return AppendedLines(path)
