"""The numbers of each step, kept on the device until a log step reads them all."""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tputrain import device as devices
from tputrain.loggers.logger import Record
from tputrain.out_of_range import out_of_range_in

_PERCENTILES = (50, 90, 99)
RECORDED = (
    "step",
    "loss",
    "loss_hex",
    "grad_norm",
    "tokens",
    "samples",
    "host_seconds",
    "compilations",
    "disk_hits",
    "step_seconds",
    "step_seconds_p50",
    "step_seconds_p90",
    "step_seconds_p99",
    "data_wait",
    "mfu",
    "tokens_per_second",
    "samples_per_second",
    "tokens_per_second_per_chip",
    "samples_per_second_per_chip",
    "memory_bytes",
    "peak_memory_bytes",
    "slowest_rank",
    "slowest_rank_seconds",
)
"""What a step's record holds anyway, beside learning rates."""


@dataclass
class _Step:
    """One step whose loss and gradient norm are still on the device."""

    step: int
    loss: Tensor
    grad_norm: Tensor
    host: Record
    num_done: int
    num_flops: int | None


def _read(step: _Step) -> tuple[float, float]:
    """Its loss and gradient norm. Raises UserError where an index in it was out of range: the device knows
    that only now, and tells it of the first step in which one was.
    """
    with out_of_range_in(f"step {step.step}"):
        return float(step.loss.item()), float(step.grad_norm.item())


class StepLog:
    """Collects steps with `waiting`, `begin`, `end`, `after_step` and `wait`; `drain` reads them.

    Dispatch is asynchronous: how long one step took on the device shows only at the next read. So
    `step_seconds`, `..._per_second` and `data_wait` are means over the steps of a drain, the wait for the
    read and callbacks around the steps included. What is told by itself (evaluating, saving) is not counted.

    For the percentiles (`step_seconds_p50`, `_p90`, `_p99`) a step took its own time on the host and an equal
    share of the waits for the device. They are of the last 1,000 steps of this process that compiled nothing
    and loaded nothing from the executable cache; where there is none yet, they are not given. `mfu` is the
    share of `peak_flops` (FLOP/s of a chip) that the model's own operations come to. `slowest_rank_seconds`
    are those of a step that the slowest rank's host needs for its data and to dispatch it: ranks wait for
    each other on the device, which takes equally long on all.
    """

    def __init__(self, device: torch.device, peak_flops: float | None = None, num_chips: int = 1):
        self.device, self.num_chips = device, num_chips
        self.peak_flops = peak_flops
        self._recent: deque[float] = deque(maxlen=1000)
        self._pending: list[_Step] = []
        self._busy_seconds = 0.0
        self._waited_seconds = 0.0
        self._data_seconds = 0.0  # of the next step
        self._device_seconds = 0.0  # of waiting for the pending steps
        self._began_at = 0.0
        self._compilations = 0
        self._disk_hits = 0

    def begin(self) -> None:
        """A step begins, whose data is there."""
        # Here and not at the last step's end: what an evaluation compiled in between is not a step's.
        self._compilations = devices.compilations(self.device)
        self._disk_hits = devices.disk_hits(self.device)
        self._began_at = time.perf_counter()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """In here the host waits for the data of the next step."""
        began_at = time.perf_counter()
        yield
        seconds = time.perf_counter() - began_at
        self._waited_seconds += seconds
        self._busy_seconds += seconds
        self._data_seconds += seconds

    def end(
        self,
        step: int,
        loss: Tensor,
        grad_norm: Tensor,
        num_done: int,
        host: Record,
        num_flops: int | None = None,
    ) -> None:
        """The step was dispatched. `host` is logged as it is; `num_done`: its tokens or samples."""
        own_seconds = time.perf_counter() - self._began_at
        self._busy_seconds += own_seconds
        host_seconds, self._data_seconds = own_seconds + self._data_seconds, 0.0
        compilations = devices.compilations(self.device) - self._compilations
        disk_hits = devices.disk_hits(self.device) - self._disk_hits
        counted = {"host_seconds": host_seconds, "compilations": compilations, "disk_hits": disk_hits}
        record = host | counted
        self._pending.append(_Step(step, loss, grad_norm, record, num_done, num_flops))

    @contextmanager
    def after_step(self) -> Iterator[None]:
        """In here callbacks hear of the step that `end` was called for: their time is the step's."""
        began_at = time.perf_counter()
        yield
        seconds = time.perf_counter() - began_at
        self._busy_seconds += seconds
        self._pending[-1].host["host_seconds"] += seconds

    @property
    def host_seconds(self) -> float:
        """What this host took for the steps that were not drained yet: their data, and to dispatch them."""
        return sum(step.host["host_seconds"] for step in self._pending)

    def wait(self) -> None:
        """Wait for the last step; its values stay to be drained."""
        if self._pending:
            began_at = time.perf_counter()
            _read(self._pending[-1])
            self._device_seconds += time.perf_counter() - began_at  # time of the steps, as that of the read

    def drain(self, unit: str, slowest: tuple[int, float] | None = None) -> list[Record]:
        """Read every pending step: one record each. `unit`: tokens or samples; `slowest`: the rank with the
        largest `host_seconds`, and these.

        Only the first read waits; the rest, two small ones a step, find their values ready.
        """
        began_at = time.perf_counter()
        values = [_read(step) for step in self._pending]
        read_seconds = time.perf_counter() - began_at + self._device_seconds
        seconds = self._busy_seconds + read_seconds
        self._recent.extend(
            step.host["host_seconds"] + read_seconds / len(self._pending)
            for step in self._pending
            if step.host["compilations"] == step.host["disk_hits"] == 0
        )
        shared: dict[str, Any] = {
            "step_seconds": seconds / max(1, len(self._pending)),
            f"{unit}_per_second": sum(step.num_done for step in self._pending) / max(seconds, 1e-9),
            "data_wait": self._waited_seconds / max(seconds, 1e-9),
            "memory_bytes": devices.memory(self.device),
            "peak_memory_bytes": devices.peak_memory(self.device),
        }
        if self.num_chips > 1:
            shared[f"{unit}_per_second_per_chip"] = shared[f"{unit}_per_second"] / self.num_chips
        if slowest is not None:
            shared["slowest_rank"] = slowest[0]
            shared["slowest_rank_seconds"] = slowest[1] / max(1, len(self._pending))
        shared |= self._percentiles() | self._mfu(seconds)
        records = [
            {"step": step.step, "loss": loss, "loss_hex": loss.hex(), "grad_norm": norm} | step.host | shared
            for step, (loss, norm) in zip(self._pending, values, strict=True)
        ]
        self._pending, self._busy_seconds, self._waited_seconds, self._device_seconds = [], 0.0, 0.0, 0.0
        return records

    def _percentiles(self) -> dict[str, float]:
        if not self._recent:
            return {}
        values = np.percentile(self._recent, _PERCENTILES)
        names = (f"step_seconds_p{percent}" for percent in _PERCENTILES)
        return {name: float(value) for name, value in zip(names, values, strict=True)}

    def _mfu(self, seconds: float) -> dict[str, float]:
        flops = [step.num_flops for step in self._pending if step.num_flops is not None]
        if self.peak_flops is None or not flops or len(flops) < len(self._pending):
            return {}
        return {"mfu": sum(flops) / max(seconds, 1e-9) / (self.peak_flops * self.num_chips)}
