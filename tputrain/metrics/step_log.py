"""The numbers of each step, kept on the device until a log step reads them all."""

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tputrain import device as devices
from tputrain.loggers.logger import Record


@dataclass
class _Step:
    """One step whose loss and gradient norm are still on the device."""

    step: int
    loss: Tensor
    grad_norm: Tensor
    host: Record
    num_done: int


class StepLog:
    """Collects steps with `begin`, `data_ready` and `end`; `drain` reads them from the device.

    Dispatch is asynchronous: how long one step took on the device shows only at the next read. So
    `step_seconds`, `..._per_second` and `data_wait` are means over the steps of a drain, the wait for the
    read included, and time spent between steps (evaluating, saving) is not counted.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._pending: list[_Step] = []
        self._busy_seconds = 0.0
        self._waited_seconds = 0.0
        self._began_at = 0.0
        self._compilations = 0

    def begin(self) -> None:
        """A step begins: it waits for its data."""
        # Here and not at the last step's end: what an evaluation compiled in between is not a step's.
        self._compilations = devices.compilations(self.device)
        self._began_at = time.perf_counter()

    def data_ready(self) -> None:
        """The data of the step is on the host."""
        self._waited_seconds += time.perf_counter() - self._began_at

    def end(self, step: int, loss: Tensor, grad_norm: Tensor, num_done: int, host: Record) -> None:
        """The step was dispatched. `host` is logged as it is; `num_done`: its tokens or samples."""
        host_seconds = time.perf_counter() - self._began_at
        self._busy_seconds += host_seconds
        compilations = devices.compilations(self.device) - self._compilations
        record = host | {"host_seconds": host_seconds, "compilations": compilations}
        self._pending.append(_Step(step, loss, grad_norm, record, num_done))

    def wait(self) -> None:
        """Wait for the last step; its values stay to be drained."""
        if self._pending:
            self._pending[-1].loss.item()

    def drain(self, unit: str) -> list[Record]:
        """Read every pending step: one record each. `unit`: tokens or samples.

        Only the first read waits; the rest, two small ones a step, find their values ready.
        """
        began_at = time.perf_counter()
        values = [(float(step.loss.item()), float(step.grad_norm.item())) for step in self._pending]
        seconds = self._busy_seconds + time.perf_counter() - began_at
        memory = devices.peak_memory(self.device)
        shared: dict[str, Any] = {
            "step_seconds": seconds / max(1, len(self._pending)),
            f"{unit}_per_second": sum(step.num_done for step in self._pending) / max(seconds, 1e-9),
            "data_wait": self._waited_seconds / max(seconds, 1e-9),
            "peak_memory_bytes": memory,
        }
        records = [
            {"step": step.step, "loss": loss, "loss_hex": loss.hex(), "grad_norm": norm} | step.host | shared
            for step, (loss, norm) in zip(self._pending, values, strict=True)
        ]
        self._pending, self._busy_seconds, self._waited_seconds = [], 0.0, 0.0
        return records
