"""`trainer.recompile_budget`: how many programs steps may compile before it is said what compiles them."""

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tputrain import device as devices
from tputrain.announce import say
from tputrain.callbacks.callback import Callback
from tputrain.loggers.logger import Record

if TYPE_CHECKING:
    from tputrain.trainer import Trainer


def _what_compiles_most(causes: Sequence[str]) -> str:
    """Causes of one kind at one Python line are one culprit, whatever size or number it was each time."""
    culprits = Counter(_culprit(cause) for cause in causes)
    if not culprits:
        return "their causes are no longer known"
    ((culprit, times),) = culprits.most_common(1)
    last = next(cause for cause in reversed(causes) if _culprit(cause) == culprit)
    return f"{times} of the programs because of {last}" + " (the last of them)" * (times > 1)


def _culprit(cause: str) -> tuple[str, str]:
    return cause.partition(": ")[0], cause.rpartition(", at ")[2]


class RecompileBudget(Callback):
    """Counts what steps compile after the first one of a process."""

    def __init__(self, budget: int | None):
        """`budget`: programs; None: any number."""
        self._budget = self._limit = budget
        self._count = 0
        self._known: set[int] | None = None  # the programs that were compiled with the first step or before

    @staticmethod
    def _counted(trainer: "Trainer", record: Record) -> int:
        """A step in parts is a few programs where a later one is one."""
        is_in_parts = record["step"] <= trainer.cfg.execution.first_steps
        return min(record["compilations"], 1) if is_in_parts else record["compilations"]

    def on_log(self, trainer: "Trainer", records: Sequence[Record]) -> None:
        """Warn where the budget is spent, and again each time twice as much is."""
        if self._limit is None:
            return
        if self._known is None:  # the first step compiles, and is logged by itself
            self._known = set(devices.causes_of_compilations(trainer.device))
            return
        self._count += sum(self._counted(trainer, record) for record in records)
        if self._count <= self._limit:
            return
        programs = devices.causes_of_compilations(trainer.device)
        causes = [cause for number, cause in programs.items() if number not in self._known]
        say(
            f"warning: steps up to {records[-1]['step']} have compiled {self._count} programs, the first step"
            f" left out (trainer.recompile_budget={self._budget}); {_what_compiles_most(causes)}"
        )
        self._limit = 2 * self._count
