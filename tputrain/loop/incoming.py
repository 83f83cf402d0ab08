"""The batches of a step, waited for: a signal ends the wait, and the watchdog knows of it."""

from collections.abc import Callable
from contextlib import AbstractContextManager

from tputrain import batches as batch_of
from tputrain.errors import UserError
from tputrain.loop.label_weights import LabelWeights
from tputrain.loop.next_batches import NextBatches, StepBatches
from tputrain.loop.step import TrainStep
from tputrain.loss import may_be_probabilities
from tputrain.signals import SignalWatch
from tputrain.watchdog import DATA, FIRST_STEP, Watchdog


class IncomingBatches:
    """What the loop asks for each step's batches."""

    def __init__(
        self,
        data: NextBatches,
        weights: LabelWeights,
        train_step: TrainStep,
        signals: SignalWatch,
        watchdog: Watchdog,
        timed: Callable[[], AbstractContextManager[None]],
    ):
        """In `timed()` the host waits for data."""
        self._data, self._weights, self._signals, self._watchdog = data, weights, signals, watchdog
        self._train_step, self._timed, self._has_given = train_step, timed, False

    def draw(self, step: int) -> StepBatches | None:
        """Those of `step` (from 0), which are not taken yet; None where a signal came first."""
        with self._watchdog.phase(DATA), self._timed():
            return self._signals.wait_for(lambda: self._data.draw(step))

    def draw_ahead(self, step: int) -> None:
        """Have them come while the device is at the step before."""
        with self._watchdog.phase(DATA), self._timed():
            self._signals.wait_for(lambda: self._data.draw_ahead(step))

    def take(self, batches: StepBatches, step: int) -> StepBatches:
        """What was drawn is given out; returns it with what each part counts in the loss.

        Raises UserError where that is nothing.
        """
        with self._watchdog.phase(FIRST_STEP):  # the model may be run to find out
            weights = iter(self._weights.of([part for parts in batches.slices for part in parts]))
            batches = batches._replace(weights=[[next(weights) for _ in parts] for parts in batches.slices])
        self._data.take()
        if not any(map(sum, batches.weights)):
            is_empty = not any(map(batch_of.num_samples, batches.host))
            why = "it has no sample" if is_empty else "every label is -100"
            raise UserError(f"step {step + 1}: the batch has nothing to learn from ({why})")
        if not self._has_given:  # targets are made alike in all steps
            targets = map(batch_of.target_of, batches.host)
            self._train_step.may_be_probabilities = all(map(may_be_probabilities, targets))
            self._has_given = True
        return batches
