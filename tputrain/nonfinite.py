"""Steps whose loss or gradient norm is no number, or whose norm is a spike: found when values are read, and
dealt with as asked.

stop: the run goes back to its newest checkpoint and to the bad step again, which is replayed with every
operation looked at, and ends with what that found; after a spike, which no operation began, it ends at once.
skip: the device itself does not make the update (`tputrain.withheld_update`). rollback: the run goes back,
and on past the bad step, whose update is not made.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from torch import nn

from tputrain import batches as batch_of
from tputrain import device as devices
from tputrain import rng
from tputrain.announce import announced, say
from tputrain.batches import Batch
from tputrain.errors import UserError, in_words
from tputrain.first_nonfinite import looking_for_nonfinite
from tputrain.loggers.logger import Record
from tputrain.nonfinite_report import (
    add_replay,
    bad_step_directory,
    in_one_line,
    is_finite,
    save_bad_batch,
    what_is_bad,
)
from tputrain.spikes import SpikeLimit
from tputrain.withheld_update import WithheldUpdate

if TYPE_CHECKING:
    from tputrain.trainer import Trainer


class BadSteps:
    """What a Trainer asks about such steps, at four moments of its loop."""

    def __init__(self, trainer: "Trainer"):
        self.trainer = trainer
        self.policy, self.limit = trainer.cfg.trainer.on_nonfinite, trainer.cfg.trainer.nonfinite_limit
        self.left_out: set[int] = set()
        """Steps that a rollback goes past: done again, but for the update. In the checkpoint."""
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
        """Before a step: find out why it went bad when it was done before, from the very same state."""
        step = self.trainer.step + 1
        if step in self._to_replay:
            say(f"step {step}: {in_one_line(self._replay_and_report(batches))}")

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

    def judge(self, records: Sequence[Record]) -> None:
        """After values were read: see to the first bad step among `records`. Raises UserError to stop."""
        recent, self._recent = self._recent, {}
        if self.policy == "continue":
            return
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
            self._see_to(why, record, in_a_row, recent[record["step"]])
        if self.policy == "skip" or not bad:  # else the run is back before these steps
            self._spike_limit.learn(good_norms)
            if records[-1]["step"] % self.trainer.cfg.log.every == 0:
                self._spike_limit.move()

    def _see_to(self, why: str, record: Record, in_a_row: int, batches: list[Batch]) -> None:
        trainer, step = self.trainer, record["step"]
        run_dir = trainer.run_dir if trainer.world.is_first else None
        directory = None if run_dir is None else save_bad_batch(run_dir, record, batches)
        kept = "" if directory is None else f"; its batch is in {directory}"
        replays = not is_finite(record) and trainer.world.size == 1  # many ranks do not; no op began a spike
        # What follows a step that is gone back before does not count: it is done again without that step.
        num_borne = {"skip": in_a_row - 1, "rollback": len(self.left_out)}.get(self.policy, -1)
        if num_borne >= self.limit:
            raise self._stopped(why, f"{kept}; trainer.nonfinite_limit={self.limit} is used up")
        if self.policy == "skip":
            found = ""
            if replays:
                found = f"; {self._replay_where_it_is(batches, directory)}"
            say(f"{why}: its update was not made{kept}{found}")
            return
        if (self.policy == "stop" and not replays) or trainer.is_interrupted or not self._went_back():
            raise self._stopped(why, kept)
        if replays:
            self._to_replay.add(step)
        if self.policy == "rollback":
            self.left_out.add(step)
            say(f"{why}: back to step {trainer.step}, and on past it without its update{kept}")
            return
        with announced(f"{why}: on from step {trainer.step} to it again, to see why"):
            while trainer.step < step - 1 and not trainer.is_interrupted:
                trainer.repeat_step()
            if trainer.is_interrupted:
                raise self._stopped(why, kept)
            found = in_one_line(self._replay_and_report(trainer.batches_of_next_step().host))
        raise self._stopped(why, f"{kept}; {found}")

    def _stopped(self, why: str, cause: str = "") -> UserError:
        """The error, one line, that ends the run; `cause`: what is known of where it came from."""
        store = self.trainer.store
        again = "there is no checkpoint yet, so it begins anew"
        if store is not None and store.steps():
            again = "it goes on from the newest checkpoint"
        leave_out = ""
        if self.policy == "stop":
            leave_out = "; trainer.on_nonfinite=skip or rollback leaves such batches out"
        return UserError(
            f"{why}; the run stops, so that no checkpoint holds this{cause}; lower optim.learning_rate (or "
            f"trainer.max_grad_norm) and run again, {again}{leave_out}"
        )

    def _went_back(self) -> bool:
        try:
            return self.trainer.go_back(goes_on=self.policy == "rollback")
        except (OSError, SafetensorError) as error:
            say(f"the run cannot go back to its beginning: {in_words(error)}")
            return False

    def _replay_where_it_is(self, batches: list[Batch], directory: Path | None) -> str:
        """Steps after the bad one were done already: what a replay with their weights finds, in one line."""
        found, note = self._replay(batches), f"with the weights of step {self.trainer.step}"
        if directory is not None:
            add_replay(directory, found, note)
        return f"{in_one_line(found)} ({note})"

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
        with _Untouched(trainer.model, trainer.optimizer, trainer.device):
            with trainer.execution.in_form("debug"), looking_for_nonfinite() as looking:
                weights = [[weight] for weight in trainer.label_weights.of(batches)]
                trainer.train_step.gradients(*batch_of.counted([[each] for each in batches], weights, 0))
        devices.flush(trainer.device)  # the next step's program must not hold any of this
        return looking.found


class _Untouched:
    """Context after which a model's buffers, its gradients and all random numbers are what they were."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device):
        self.model, self.optimizer, self.device = model, optimizer, device

    def __enter__(self) -> None:
        self._generators = rng.capture(self.device)
        self._buffers = [(buffer, buffer.clone()) for buffer in self.model.buffers()]

    def __exit__(self, *_: object) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            for buffer, before in self._buffers:
                buffer.copy_(before)
        rng.restore(self.device, self._generators)
