"""`execution.train: auto`: a run measures both forms of its step, once, and goes on with the faster one."""

import time
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from tputrain import device as devices
from tputrain.announce import say

WARM_STEPS = 4  # of each form, before it is measured
BLOCKS, BLOCK_STEPS = 3, 4  # a form is measured in so many blocks of so many steps; the fastest one counts
NEEDED = 0.98  # the compiled step must take at most this share of the fused one's time

_MEASURED = BLOCKS * BLOCK_STEPS
_LENGTH = (
    _MEASURED + WARM_STEPS + _MEASURED
)  # of fused steps, then of compiled ones, the first of which do not count


@dataclass
class _Record:
    begun_at: int | None = None  # the step after which the trial began
    ready_at: int | None = None  # the step after which the compiled step was there, and measuring began
    form: str = "fused"  # of the last step
    seconds: dict[str, float] = field(default_factory=dict)  # a step's, by form: the fastest block
    chosen: str | None = None


class Trial:
    """First fused steps, then compiled ones; then one of both, for good.

    While fused steps go on, threads compile the other one; nothing is measured before they are done. From
    then on which form a step has follows from its number. That number and the seconds, from which the choice
    is made, are in the record, which checkpoints hold; so a resumed run does what its checkpoint says. Where
    blocks begin and end the host waits for the device.
    """

    def __init__(self, device: torch.device, **record: Any):
        """`record`: what `state` gave; of a trial that had not learned to rehearse, when it began."""
        if record.get("chosen") is None and "ready_at" not in record:
            record = {"begun_at": record.get("begun_at")}
        self._device = device
        self._record = _Record(**record)
        if self._record.chosen is None:
            self._record.seconds = {}  # another process's: none that this one's can be compared with
        self._block_began = 0.0
        self._in_block = False
        self._warm_steps = 0  # of this process
        self._is_rehearsed = device.type != "tpu"  # elsewhere nothing is built before it is called

    def state(self) -> dict[str, Any]:
        return asdict(self._record)

    @property
    def form(self) -> str:
        """The one chosen; before that, that of the last step."""
        return self._record.chosen or self._record.form

    def before_step(self, step: int) -> str:
        """The form of the step after `step`."""
        record = self._record
        if record.chosen is not None:
            return record.chosen
        if record.begun_at is None:
            record.begun_at = step
        if record.ready_at is None:
            is_warm = self._warm_steps == WARM_STEPS
            if not (is_warm and self._is_rehearsed) or devices.is_compiling_ahead(self._device):
                return "fused"
            record.ready_at = step
        place = step - record.ready_at
        if self._is_measured(place) and self._place_in_block(place) == 0:
            devices.wait(self._device)
            self._block_began, self._in_block = time.perf_counter(), True
        return self._form_at(place)

    @property
    def wants_rehearsal(self) -> bool:
        """Whether it is time to begin with the compiled step: fused ones are under way."""
        return self._warm_steps == WARM_STEPS and self._record.ready_at is None and not self._is_rehearsed

    def rehearsed(self) -> None:
        """The compiled step is being built, or will be when its time comes."""
        self._is_rehearsed = True

    def after_step(self, step: int) -> None:
        """Step number `step` was dispatched."""
        record = self._record
        self._warm_steps = min(self._warm_steps + 1, WARM_STEPS)
        if record.chosen is not None or record.ready_at is None:
            return
        place = step - 1 - record.ready_at
        record.form = self._form_at(place)
        if self._in_block and self._place_in_block(place) == BLOCK_STEPS - 1:
            devices.wait(self._device)
            seconds = (time.perf_counter() - self._block_began) / BLOCK_STEPS
            record.seconds[record.form] = min(seconds, record.seconds.get(record.form, seconds))
            self._in_block = False
        if place == _LENGTH - 1:
            self._choose(step)

    def _choose(self, step: int) -> None:
        fused, compiled = (self._record.seconds.get(form) for form in ("fused", "compile"))
        if fused is None or compiled is None:  # the run was interrupted meanwhile
            self._record.ready_at = step
            say("execution.train=auto: fused and compiled steps are measured anew, in one process")
            return
        is_faster = compiled <= NEEDED * fused
        self._record.chosen = "compile" if is_faster else "fused"
        choice = f"compile from step {step + 1} on" if is_faster else "stays fused"
        say(
            f"execution.train=auto: {choice}; a compiled step takes {1e3 * compiled:.1f} ms, a fused one "
            f"{1e3 * fused:.1f} ms"
        )

    def end(self) -> None:
        """The run ended: say so where nothing was chosen."""
        if self._record.chosen is None and self._warm_steps > 0:
            say(
                "execution.train=auto: the run ended before fused and compiled steps were both measured; it "
                f"takes {_LENGTH} steps once the compiled one is built"
            )

    @staticmethod
    def _form_at(place: int) -> str:
        return "fused" if place < _MEASURED else "compile"

    @staticmethod
    def _is_measured(place: int) -> bool:
        return not _MEASURED <= place < _MEASURED + WARM_STEPS

    @staticmethod
    def _place_in_block(place: int) -> int:
        return (place if place < _MEASURED else place - WARM_STEPS) % BLOCK_STEPS
