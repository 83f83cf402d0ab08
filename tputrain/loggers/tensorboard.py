"""Curves for TensorBoard: `tensorboard --logdir run_dir/tensorboard`."""

import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from tputrain.announce import warn
from tputrain.errors import UserError
from tputrain.loggers.jsonl import evaluated_at
from tputrain.loggers.logger import Logger, Record, expect_run_dir, numbers_of

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoardLogger(Logger):
    """Writes `train/...` for steps and `evaluation/...` for evaluations into an event file a process.

    Event files are only ever added to. A process that goes on from step N begins its file with the mark that
    makes TensorBoard forget what earlier files hold of later steps, so each step is shown once.
    """

    def __init__(self, run_dir: Path | None):
        self.run_dir = run_dir
        self._writer: SummaryWriter | None = None
        self._evaluated_at = -1

    def start(self, step: int, total_steps: int | None, resumed: bool) -> None:
        purge_step = step + 1 if resumed else 0
        run_dir = expect_run_dir(self.run_dir, "log.tensorboard=true")
        # What is of later steps than this one is hidden by the mark; of this very step it is not.
        self._evaluated_at = min(step, evaluated_at(run_dir)) if resumed else -1
        directory = run_dir / "tensorboard"
        writer_class = _writer_class()
        _pass_the_second_of(directory)
        self._writer = writer_class(log_dir=str(directory), purge_step=purge_step)

    def log(self, records: list[Record]) -> None:
        self._add("train", records)

    def log_evaluation(self, record: Record) -> None:
        if record["step"] > self._evaluated_at:
            self._add("evaluation", [record])

    def _add(self, group: str, records: list[Record]) -> None:
        if self._writer is None:
            return
        try:
            for record in records:
                for name, value in numbers_of(record).items():
                    self._writer.add_scalar(f"{group}/{name}", value, record["step"])
            self._writer.flush()
        except OSError as error:
            # Its thread has ended with that error, and tells it at every call from here on.
            self._writer = None
            warn(
                f"{self.run_dir}: TensorBoard's curves end here ({error.strerror}); training goes on, and "
                "metrics.jsonl has the numbers"
            )

    def close(self) -> None:
        if self._writer is not None:
            with suppress(OSError):  # as above; what was logged has been flushed
                self._writer.close()
            self._writer = None


def _pass_the_second_of(directory: Path) -> None:
    """Wait, at most a second, until a new event file's name comes after the ones that are there.

    TensorBoard reads files in the order of their names, which hold the second they were made in; the mark
    of a process that went on within that second could be read before what it hides.
    """
    seconds = [int(file.name.split(".")[3]) for file in directory.glob("events.out.tfevents.*")]
    while seconds and int(time.time()) == max(seconds):
        time.sleep(0.05)


def _writer_class() -> "type[SummaryWriter]":
    # Imported where it is asked for: it is an extra, and takes a second.
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise UserError(
            f"log.tensorboard=true: {error}; install it with `pip install 'tputrain[tensorboard]'`, "
            "or set log.tensorboard=false"
        ) from None
    return SummaryWriter
