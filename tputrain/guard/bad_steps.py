"""Steps whose loss or gradient norm is no number, or whose norm is a spike: found when values are read, and
dealt with as asked.

stop: the run goes back to its newest checkpoint and to the bad step again, which is replayed with every
operation looked at, and ends with what that found; after a spike, which no operation began, it ends at once.
skip: the device itself does not make the update (`withheld_update`). rollback: the run goes back, and on past
the bad step, whose update is not made.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from tputrain import batches as batch_of
from tputrain import device as devices
from tputrain import rng
from tputrain.announce import say
from tputrain.batches import Batch
from tputrain.errors import UserError
from tputrain.guard.bad_step_report import (
    add_replay,
    bad_step_directory,
    data_to_blame,
    in_one_line,
    is_finite,
    save_bad_batch,
    what_is_bad,
)
from tputrain.guard.first_nonfinite import looking_for_nonfinite
from tputrain.guard.spikes import SpikeLimit
from tputrain.guard.withheld_update import WithheldUpdate
from tputrain.loggers.logger import Record

if TYPE_CHECKING:
    from tputrain.trainer import Trainer

_LOWER_THE_RATE = "lower optim.learning_rate (or trainer.max_grad_norm)"


class Verdict(NamedTuple):
    """On a bad step that the run cannot simply go past. The loop acts on it."""

    why: str
    step: int
    known: str
    """Of where it came from, to be added to a line."""
    goes_back: bool
    """Whether the run goes back before it: past it, or to see why it went bad. Else the run stops."""
    is_replayed: bool = False


class BadSteps:
    """The judge of a Trainer's steps. It changes nothing but what it remembers of them."""

    def __init__(self, trainer: "Trainer"):
        self.trainer = trainer
        self.policy, self.limit = trainer.cfg.trainer.on_nonfinite, trainer.cfg.trainer.nonfinite_limit
        self.left_out: set[int] = set()
        """Steps that a rollback goes past: done again, but for the update. In the checkpoint."""
        self.examined: Verdict | None = None
        """On the bad step that the run, which is to stop, is on its way to again; None: it is not."""
        self._to_replay: set[int] = set()
        self._recent: dict[int, list[Batch]] = {}  # on the host, of steps whose values were not read yet
        self._in_a_row = 0
        self._spike_limit = SpikeLimit(trainer.cfg.trainer.spike_factor)

    @property
    def goes_back(self) -> bool:
        """Whether it may ask for an earlier state of the run."""
        return self.policy in ("stop", "rollback")

    @property
    def needs_checkpoint(self) -> bool:
        """Whether to go back takes a checkpoint, from the start on: ranks keep no beginning in memory."""
        return self.policy == "rollback" and self.trainer.world.size > 1

    def state(self) -> dict[str, Any]:
        """What of this a checkpoint holds."""
        return {
            "left_out": sorted(self.left_out),
            "spikes": self._spike_limit.state(),
            "in_a_row": self._in_a_row,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Take what `state` gave; a step that a rollback has just added stays left out."""
        self.left_out |= set(state["left_out"])
        self._spike_limit.restore(state["spikes"])
        self._in_a_row = state.get("in_a_row", 0)  # checkpoints of before had none

    def replay_if_due(self, batches: list[Batch]) -> None:
        """Before a step: find out why it went bad when it was done before, from the very same state.

        Raises UserError, with what was found, where the run is to stop there.
        """
        step = self.trainer.step + 1
        if step in self._to_replay:
            found = self._replay_and_report(batches)
            line = in_one_line(found, batches)
            if self.examined is not None:
                advice = "mend the data" if data_to_blame(found, batches) else _LOWER_THE_RATE
                raise self.stopped(self.examined, line, advice)
            say(f"step {step}: {line}")

    @property
    def leaves_out_next(self) -> bool:
        """Whether the next step is to be done without its update."""
        return self.trainer.step + 1 in self.left_out

    def withheld_update(self) -> WithheldUpdate | None:
        """At the beginning of a step: what takes its update back on the device, where that is wanted."""
        if self.policy != "skip" and not self.leaves_out_next:
            return None
        averages = self.trainer.evaluation_weights.averages
        largest_norm = -math.inf if self.leaves_out_next else self._spike_limit.value
        return WithheldUpdate(self.trainer.model, self.trainer.optimizer, averages, largest_norm)

    def remember(self, step: int, batches: list[Batch]) -> None:
        """After a step was dispatched: its batches, in case it turns out to be bad."""
        if self.policy != "continue":
            self._recent[step] = batches

    def judge_evaluation(self, record: Record) -> None:
        """Raises UserError where a loss of an evaluation is not finite, and that is to stop the run."""
        if self.policy != "stop":
            return
        for name, value in record.items():
            if name.rpartition("/")[2] == "loss" and not math.isfinite(value):
                raise self._stopped(f"step {record['step']}: {name} is {value}")

    def judge(self, records: Sequence[Record]) -> Verdict | None:
        """After values were read: on the first bad step among `records` that is not simply gone past."""
        recent, self._recent = self._recent, {}
        if self.policy == "continue":
            return None
        bad: list[tuple[str, Record, int]] = []
        good_norms: list[float] = []
        for record in records:
            why = what_is_bad(record, self._spike_limit.value)
            self._in_a_row = 0 if why is None else self._in_a_row + 1
            if why is None:
                good_norms.append(record["grad_norm"])
            elif record["step"] not in self.left_out:
                bad.append((why, record, self._in_a_row))
        for why, record, in_a_row in bad if self.policy == "skip" else bad[:1]:
            verdict = self._verdict(why, record, in_a_row, recent[record["step"]])
            if verdict is not None:  # what comes after it is done again, or not at all
                return verdict
        self._spike_limit.learn(good_norms)
        if records[-1]["step"] % self.trainer.cfg.log.every == 0:
            self._spike_limit.move()
        return None

    def _verdict(self, why: str, record: Record, in_a_row: int, batches: list[Batch]) -> Verdict | None:
        """Of one bad step; its batch is kept. None: the device has left its update out already."""
        trainer, step = self.trainer, record["step"]
        run_dir = trainer.run_dir if trainer.world.is_first else None
        directory = None if run_dir is None else save_bad_batch(run_dir, record, batches)
        kept = "" if directory is None else f"; its batch is in {directory}"
        is_replayed = (
            not is_finite(record) and trainer.world.size == 1
        )  # many ranks do not; no op began a spike
        # What follows a step that is gone back before does not count: it is done again without that step.
        num_borne = {"skip": in_a_row - 1, "rollback": len(self.left_out)}.get(self.policy, -1)
        if num_borne >= self.limit:
            used_up = f"{kept}; trainer.nonfinite_limit={self.limit} is used up"
            return Verdict(why, step, used_up, goes_back=False)
        if self.policy == "skip":
            found = f"; {self._replay_where_it_is(batches, directory)}" if is_replayed else ""
            say(f"{why}: its update was not made{kept}{found}")
            return None
        return Verdict(why, step, kept, self.policy == "rollback" or is_replayed, is_replayed)

    def went_back(self, verdict: Verdict) -> None:
        """The run is back before the step of `verdict`, and goes on."""
        if verdict.is_replayed:
            self._to_replay.add(verdict.step)
        if self.policy == "rollback":
            self.left_out.add(verdict.step)
            say(
                f"{verdict.why}: back to step {self.trainer.step}, and on past it without its update"
                f"{verdict.known}"
            )
        else:
            self.examined = verdict
            say(f"{verdict.why}: on from step {self.trainer.step} to it again, to see why")

    def stopped(self, verdict: Verdict, found: str = "", advice: str = _LOWER_THE_RATE) -> UserError:
        """The error that ends the run for it; `found`: by the replay; `advice`: what to do."""
        self.examined = None
        return self._stopped(verdict.why, f"{verdict.known}{found and f'; {found}'}", advice)

    def _stopped(self, why: str, cause: str = "", advice: str = _LOWER_THE_RATE) -> UserError:
        """The error, one line, that ends the run; `cause`: what is known of where it came from."""
        store = self.trainer.store
        again = "there is no checkpoint yet, so it begins anew"
        if store is not None and store.steps():
            again = "it goes on from the newest checkpoint"
        leave_out = ""
        if self.policy == "stop":
            leave_out = "; trainer.on_nonfinite=skip or rollback leaves such batches out"
        return UserError(
            f"{why}; the run stops, so that no checkpoint holds this{cause}; {advice} and run again, "
            f"{again}{leave_out}"
        )

    def _replay_where_it_is(self, batches: list[Batch], directory: Path | None) -> str:
        """Steps after the bad one were done already: what a replay with their weights finds, in one line."""
        found, note = self._replay(batches), f"with the weights of step {self.trainer.step}"
        if directory is not None:
            add_replay(directory, found, note)
        return f"{in_one_line(found, batches)} ({note})"

    def _replay_and_report(self, batches: list[Batch]) -> dict[str, Any]:
        step, run_dir = self.trainer.step + 1, self.trainer.run_dir
        assert run_dir is not None, "there was a checkpoint to go back to"
        self._to_replay.discard(step)
        found = self._replay(batches)
        add_replay(bad_step_directory(run_dir, step), found, "from the state that the step had")
        return found

    def _replay(self, batches: list[Batch]) -> dict[str, Any]:
        """Forward and backward of a step with every operation looked at; all is as before afterwards."""
        trainer = self.trainer
        with _untouched(trainer.model, trainer.optimizer, trainer.device):
            debug = trainer.execution.in_form("debug")
            with debug, trainer.train_step.aside(), looking_for_nonfinite() as looking:
                weights = [[weight] for weight in trainer.label_weights.of(batches)]
                trainer.train_step.gradients(*batch_of.counted([[each] for each in batches], weights, 0))
        devices.flush(trainer.device)  # the next step's program must not hold any of this
        return looking.found


@contextmanager
def _untouched(model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> Iterator[None]:
    """Afterwards a model's buffers and all random numbers are what they were, and it has no gradients."""
    with rng.kept(device):
        buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
        try:
            yield
        finally:
            optimizer.zero_grad(set_to_none=True)
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)
