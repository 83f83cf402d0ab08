"""All that a checkpoint holds of a run: taken from a Trainer, and put back."""

from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tputrain import device as devices
from tputrain import rng
from tputrain.announce import say
from tputrain.callbacks.callback import load_state_of, state_of
from tputrain.checkpoint.configuration import padding_of
from tputrain.checkpoint.state import understood
from tputrain.config_checks import spelled
from tputrain.config_differences import changed_settings
from tputrain.guard.bad_steps import BadSteps
from tputrain.loop import position
from tputrain.loop.initial_values import InitialValues
from tputrain.loop.next_batches import NextBatches
from tputrain.optim.given_options import GivenOptions
from tputrain.optim.rates import LearningRates
from tputrain.optim.schedule import jump
from tputrain.optim.schedule_free import progress_options
from tputrain.snapshot import contents
from tputrain.snapshot.snapshot import Snapshot, take_snapshot
from tputrain.versions import versions

if TYPE_CHECKING:
    from tputrain.trainer import Trainer


class RunState:
    """The state of a Trainer's run, to the bit: what goes on from it is the uninterrupted run."""

    def __init__(
        self,
        trainer: "Trainer",
        data: NextBatches | None,
        bad_steps: BadSteps,
        initial_values: InitialValues,
        rates: LearningRates,
        has_own_optimizer: bool,
    ):
        """`has_own_optimizer`: whether the configuration made the optimizer, whose options it then sets."""
        self._trainer, self._data, self._bad_steps = trainer, data, bad_steps
        self._initial_values = initial_values
        self._rates, self._has_own_optimizer = rates, has_own_optimizer
        self._given = None if has_own_optimizer else GivenOptions(trainer.optimizer, rates.scheduler)

    def snapshot(self) -> Snapshot:
        """Copy all of it to the host, which waits for the device."""
        trainer = self._trainer
        with nullcontext() if self._data is None else self._data.as_not_drawn():
            return take_snapshot(
                trainer.step,
                trainer.model,
                trainer.tokenizer,
                trainer.optimizer,
                trainer.evaluation_weights,
                self._beside_tensors,
            )

    def _beside_tensors(self, optimizer: dict[str, Any]) -> dict[str, Any]:
        trainer = self._trainer
        numbers = rng.capture(trainer.device)
        return {
            **position.state_of(trainer),
            "rng": numbers,
            "rng_of_other_ranks": trainer.world.of_all(numbers["device"])[1:],
            "data_ranks": trainer.world.of_all(trainer.world.data_rank),
            "data": None if self._data is None else self._data.state(),
            "optimizer": optimizer,
            "train_step": trainer.train_step.state_dict(),
            "lr_scheduler": self._rates.state(),
            "given_options": None if self._given is None else self._given.state(),
            "callbacks": state_of(trainer.callbacks),
            "bad_steps": self._bad_steps.state(),
            "padding": padding_of(trainer.model),
            "config": asdict(trainer.cfg),
            "versions": versions(),
        }

    @understood
    def load(self, path: Path, name: str | None = None) -> None:
        """Take everything from the checkpoint at `path`, found whole, which people know by `name`."""
        trainer, state = self._trainer, contents.load_state(path)
        contents.load_model(trainer.model, path)
        self._initial_values.come_from_elsewhere()
        contents.load_lora_averages(trainer.model, path)
        trainer.evaluation_weights.begin(state["step"])
        contents.load_trained_weights(trainer.model, path)
        options = progress_options(trainer.optimizer) if self._has_own_optimizer else None
        contents.load_optimizer(trainer.optimizer, trainer.model, path, state["optimizer"], options)
        self._rates.restore(state["lr_scheduler"])
        trainer.train_step.load_state_dict(state.get("train_step", {}))  # earlier checkpoints have none
        for kind in load_state_of(trainer.callbacks, state["callbacks"]):
            say(f"note: {path} holds state of a callback {kind}, which this run has not")
        if self._data is not None and state["data"] is not None:
            self._data.restore(state["data"])
        self._restore_rng(state)
        position.restore(trainer, state)
        if "bad_steps" in state:  # the first checkpoints of all had none
            self._bad_steps.restore(state["bad_steps"])
        # The next step's program must not hold the loading: in an uninterrupted run it would not.
        devices.flush(trainer.device)
        say(f"resumed from {name or path} at step {trainer.step} ({trainer.num_done:,} {trainer.unit})")
        self._say_what_changed(state, is_own=trainer.store is not None and trainer.store.holds(path))
        for note in [] if self._given is None else self._given.restore(state.get("given_options")):
            say(note)

    def _restore_rng(self, state: dict[str, Any]) -> None:
        """The host's random numbers are alike on all ranks. On the devices, ranks draw alike if they share a
        data rank, so their states are of use only where every rank has the data rank that it had.
        """
        world, device, numbers = self._trainer.world, self._trainer.device, state["rng"]
        states = [numbers["device"], *state.get("rng_of_other_ranks", [])]
        data_ranks = world.of_all(world.data_rank)
        saved = state.get("data_ranks", data_ranks)  # earlier checkpoints do not say
        is_for_these = len(states) == world.size and saved == data_ranks
        rng.restore(device, numbers | {"device": states[world.rank if is_for_these else 0]})
        if is_for_these:
            return
        made = f"by {len(states)} rank{'s' * (len(states) > 1)} and is loaded by {world.size}"
        if len(states) == world.size:
            made = "by ranks that divided batches otherwise"
        say(f"note: the checkpoint was made {made}: random numbers on the devices (dropout) go on otherwise")
        rng.seed_rank(device, self._trainer.cfg.seed + state["step"] + 1, world.data_rank)

    def _say_what_changed(self, state: dict[str, Any], is_own: bool) -> None:
        """`is_own`: whether the checkpoint is one of this run's."""
        trainer, cfg = self._trainer, self._trainer.cfg
        if is_own and state.get("execution") is not None:  # what auto had measured
            form = state["config"]["execution"]["train"]
            say(f"note: execution.train was auto, which is gone; {form} takes its place")
        for key, (old, new) in changed_settings(state["config"], cfg).items() if is_own else ():
            if key != "run_dir":  # the same directory, by whatever name
                say(f"note: {key} is {spelled(new)} from here on, it was {spelled(old)}")
        rate, steps = cfg.optim.learning_rate, cfg.trainer.steps
        note = jump(trainer.step, state["config"], cfg.schedule, rate, steps)
        if note is not None and self._rates.is_by_config and cfg.trainer.duration is None:
            say(note)
