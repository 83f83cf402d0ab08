"""The numbers of steps: they stay on the device until a log step reads them all."""

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import nn

from tputrain import batches as batch_of
from tputrain import device as devices
from tputrain.batches import Batch
from tputrain.loggers.config import LogConfig
from tputrain.loggers.logger import Record
from tputrain.loop.logged import Logged, LoggedValues, read_on_all_ranks
from tputrain.loop.step_parts import StepResult
from tputrain.loss import LossFunction
from tputrain.metrics.flops import FlopCount
from tputrain.metrics.peak_flops import peak_flops
from tputrain.metrics.step_log import StepLog
from tputrain.parallel.world import World


class Readings:
    """One record a step: its own numbers, the times of steps, and what `trainer.log` was given."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFunction | None,
        device: torch.device,
        world: World,
        cfg: LogConfig,
    ):
        """To be made before the model is laid out over ranks: its operations are counted as of one."""
        self._device, self._world = device, world
        self._peak_flops = cfg.peak_flops or peak_flops(devices.chip_name(device))
        has_peak = self._peak_flops is not None
        self._flops = FlopCount(model, loss_fn, world.size > 1) if has_peak else None
        self.logged = LoggedValues()
        self.forget()

    def forget(self) -> None:
        """The run goes back: what was not read yet is not logged."""
        self._steps = StepLog(self._device, self._peak_flops, self._world.size)
        self._logged: list[Logged] = []  # of the steps that are pending there

    @property
    def host_seconds(self) -> float:
        """What this host took for the steps that were not read yet."""
        return self._steps.host_seconds

    @property
    def not_counted(self) -> str | None:
        """Why there is no MFU, where the model's operations cannot be counted."""
        return None if self._flops is None else self._flops.problem

    def waiting(self) -> AbstractContextManager[None]:
        """In here the host waits for the data of the next step."""
        return self._steps.waiting()

    def begin_step(self) -> None:
        """A step begins, whose data is there."""
        self._add_to_last_step()
        self._steps.begin()

    def end_step(self, step: int, batches: Sequence[Batch], result: StepResult, host: Record) -> None:
        """The step was dispatched; `host` is logged as it is."""
        num_done = sum(batch_of.size(batch) for batch in batches)
        num_flops = None
        if self._flops is not None:
            with self.logged.collected():  # the model is run, to be counted
                num_flops = self._flops.of_step(batches)
        self._steps.end(step, result.loss, result.grad_norm, num_done, host, num_flops)
        self._logged.append({**result.logged})
        self._add_to_last_step()

    def after_step(self) -> AbstractContextManager[None]:
        """In here callbacks hear of the step that was dispatched."""
        return self._steps.after_step()

    def _add_to_last_step(self) -> None:
        """What was given outside of steps, in callbacks, belongs to the step before; at first to the next."""
        if self._logged:
            self._logged[-1] |= self.logged.taken()

    def wait(self) -> None:
        """Wait for the last step."""
        self._steps.wait()

    def read(self, unit: str, slowest: tuple[int, float] | None = None) -> list[Record]:
        """One record for each step since the last time; see `StepLog.drain`. All ranks call it together."""
        self._add_to_last_step()
        records = self._steps.drain(unit, slowest)
        logged, self._logged = self._logged, []
        if records:
            values = read_on_all_ranks(logged, self._world)
            records = [record | more for record, more in zip(records, values, strict=True)]
        return records
