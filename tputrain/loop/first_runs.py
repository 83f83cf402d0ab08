"""What runs for the first time may compile for minutes: it is announced, and a signal meanwhile counts."""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import NoReturn

import torch

from tputrain.announce import announced
from tputrain.execution import Execution
from tputrain.out_of_range import out_of_range_in
from tputrain.signals import SignalWatch
from tputrain.watchdog import FIRST_STEP, STEP, Watchdog


class FirstRuns:
    """Two contexts of the training loop: `step` around a step, `evaluation` around an evaluation."""

    def __init__(
        self,
        execution: Execution,
        device: torch.device,
        signals: SignalWatch,
        watchdog: Watchdog,
        rescue: Callable[[], Callable[[int], NoReturn] | None],
        wait: Callable[[], None],
    ):
        """`rescue()` copies the state, and gives what saves it (`SignalWatch.rescue_by`); None: there is no
        way. `wait()` returns when the device has done the step.
        """
        self._execution, self._device, self._signals, self._watchdog = execution, device, signals, watchdog
        self._rescue, self._wait = rescue, wait
        self._batches: Hashable = None
        self._is_warm = False
        self.is_first_step = False
        """Whether the step under way, or the last one, is the first of this process or in its form."""

    def is_new(self, batches: Hashable) -> bool:
        """Before each step, on `batches` of this form: whether its program is one that was not run yet."""
        self._is_warm &= not self._execution.before_step()
        self.is_first_step, self._batches = not self._is_warm, batches
        return self.is_first_step or (self._execution.compiles and self._execution.is_new("train", batches))

    @contextmanager
    def step(self, number: int, is_new: bool) -> Iterator[bool]:
        """In here step `number` is dispatched; yields False where a signal came before, and it must not be.

        The first one gets its program, so it is announced and waited for.
        """
        # A device tells of an earlier step, where many were not read yet.
        which = f"step {number}" + ("" if self._device.type == "cpu" else ", or one since the last log step")
        with self._rescued(is_new), out_of_range_in(which):
            if self._signals.received is not None:  # while the state was copied
                yield False
                return
            if not self.is_first_step:
                with self._watchdog.phase(STEP):
                    yield True
            else:
                program = (
                    " is recorded, and its program compiled or found" if self._device.type == "tpu" else ""
                )
                what = f"step {number}, the first {self._execution.first_of},{program}"
                with self._watchdog.phase(FIRST_STEP), announced(what):
                    yield True
                    self._wait()
                self._is_warm = True
        self._execution.has_run("train", self._batches)
        self._execution.after_step()

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """In here an evaluation runs."""
        with self._rescued(self._execution.is_new("validate")):
            yield

    @contextmanager
    def _rescued(self, is_new: bool) -> Iterator[None]:
        """In here a thread acts on signals where this one is too busy to, with the state as it is now."""
        if is_new:
            self._signals.rescue_by(self._rescue())
        try:
            yield
        finally:
            self._signals.rescue_by(None)
