"""Progress for people: a bar on a terminal, plain lines elsewhere."""

import sys
import time
from typing import Any

from tputrain.announce import say
from tputrain.figures import percent
from tputrain.loggers.logger import Logger, Record

_LONGEST_SILENCE = 5.0  # seconds


def console_logger(progress: str) -> Logger:
    """The logger for `log.progress`: bar, plain, none or auto."""
    if progress == "auto":
        progress = "bar" if sys.stdout.isatty() else "plain"
    return {"bar": BarLogger, "plain": PlainLogger, "none": Logger}[progress]()


class PlainLogger(Logger):
    """A line at every log step, and in between where it would otherwise be silent for long."""

    def __init__(self) -> None:
        self._spoke_at = time.monotonic()

    def start(self, step: int, total_steps: int | None, resumed: bool) -> None:
        self.total_steps = total_steps
        self._spoke_at = time.monotonic()

    def after_step(self, step: int) -> None:
        # Only what the host knows: reading the loss here would stop the device for the sake of a line.
        if time.monotonic() - self._spoke_at > _LONGEST_SILENCE:
            self._say(f"step {self._of_all(step)}")

    def log(self, records: list[Record]) -> None:
        if records:
            last = records[-1]
            self._say(f"step {self._of_all(last['step'])}  {_describe_step(last)}")

    def log_evaluation(self, record: Record) -> None:
        self._say(describe_evaluation(record))

    def _of_all(self, step: int) -> str:
        return str(step) if self.total_steps is None else f"{step}/{self.total_steps}"

    def _say(self, line: str) -> None:
        say(line)
        self._spoke_at = time.monotonic()


class BarLogger(Logger):
    """rich's progress bar; what others print goes above it."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._task: Any = None

    def start(self, step: int, total_steps: int | None, resumed: bool) -> None:
        # Imported here because only a terminal needs it.
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[text]}"),
        )
        self.total_steps = total_steps
        self._task = self._bar.add_task("training", total=total_steps, completed=step, text="")
        self._bar.start()

    def after_step(self, step: int) -> None:
        self._bar.update(self._task, completed=step)

    def log(self, records: list[Record]) -> None:
        if records:
            last = records[-1]
            text = _describe_briefly(last)
            self._bar.update(self._task, completed=last["step"], total=self.total_steps, text=text)

    def log_evaluation(self, record: Record) -> None:
        say(describe_evaluation(record))

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def describe_evaluation(record: Record) -> str:
    """One line: `evaluation at step 100: loss 4.1234, perplexity 61.8, bits per byte 1.702`."""
    spoken = {key: value for key, value in record.items() if key not in ("step", "loss_hex", "seconds")}
    values = ", ".join(f"{key.replace('_', ' ')} {value:.4f}" for key, value in spoken.items())
    return f"evaluation at step {record['step']}: {values}"


def _describe_briefly(record: Record) -> str:
    """What fits beside a bar on a terminal of 80 columns."""
    unit = "tokens" if "tokens" in record else "samples"
    return f"loss {record['loss']:.3f} {record[f'{unit}_per_second']:,.0f} {unit}/s"


def _describe_step(record: Record) -> str:
    unit = "tokens" if "tokens" in record else "samples"
    of_a_chip = record.get(f"{unit}_per_second_per_chip")
    a_chip = "" if of_a_chip is None else f" ({of_a_chip:,.0f} a chip)"
    return (
        f"loss {record['loss']:.4f}  lr {record['learning_rate']:.2e}  grad norm {record['grad_norm']:.2f}  "
        f"{record[f'{unit}_per_second']:,.0f} {unit}/s{a_chip}  {record['step_seconds']:.3f} s/step  "
        f"data wait {record['data_wait']:.0%}"
        + (f"  mfu {percent(record['mfu'])}" if "mfu" in record else "")
        + (f"  slowest rank {record['slowest_rank']}" if "slowest_rank" in record else "")
    )
