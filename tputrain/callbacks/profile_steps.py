"""Records what the host does during a few steps, as a trace to look at."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from tputrain.announce import say, warn
from tputrain.callbacks.callback import Callback
from tputrain.config_checks import Settings, expect_at_least
from tputrain.errors import UserError

if TYPE_CHECKING:
    from tputrain.trainer import Trainer

_KEY = "callbacks.profile"


@dataclass(frozen=True)
class ProfileConfig(Settings):
    """Which steps of a process are recorded, in the words of `torch.profiler.schedule`."""

    active: int | None = None
    """Steps that are recorded at a time; None: none."""
    wait: int = 10
    """Steps before each recording, which keep compilation out of the first one."""
    warmup: int = 1
    """Of the steps before a recording, how many run with the profiler already on."""
    repeat: int = 1
    """How many recordings."""

    def __post_init__(self) -> None:
        expect_at_least(f"{_KEY}.active", self.active, 1)
        expect_at_least(f"{_KEY}.wait", self.wait, 0)
        expect_at_least(f"{_KEY}.warmup", self.warmup, 0)
        expect_at_least(f"{_KEY}.repeat", self.repeat, 1)


class ProfileSteps(Callback):
    """Writes `run_dir/profile/step-N.json`, N the last step recorded: for Perfetto or chrome://tracing.

    A trace shows the operators as Python dispatches them, their shapes and the host's time. On the tpu device
    the operators run later and together, as one program: the trace shows how long recording and launching
    take, not the chip at work.
    """

    def __init__(self, active: int, wait: int = 10, warmup: int = 1, repeat: int = 1):
        self.cfg = ProfileConfig(active, wait, warmup, repeat)
        self.schedule = schedule(active=active, wait=wait, warmup=warmup, repeat=repeat)
        self.num_steps = repeat * (active + wait + warmup)
        """After which the profiler is switched off."""
        self.directory = Path()
        self._profiler: profile | None = None
        self._num_done = 0
        self._step = 0

    def on_fit_start(self, trainer: "Trainer") -> None:
        if trainer.run_dir is None:
            raise UserError(
                f"{_KEY}.active={self.cfg.active}: no run_dir was given, so there is nowhere to write"
            )
        self.directory = trainer.run_dir / "profile"
        self._num_done, self._step = 0, trainer.step
        self._profiler = profile(
            activities=[ProfilerActivity.CPU],
            schedule=self.schedule,
            on_trace_ready=self._write,
            record_shapes=True,
            acc_events=True,
        )
        self._profiler.start()

    def on_step_end(self, trainer: "Trainer") -> None:
        if self._profiler is None:
            return
        self._num_done, self._step = self._num_done + 1, trainer.step
        self._profiler.step()
        if self._num_done == self.num_steps:
            self.close()

    def close(self) -> None:
        if self._profiler is not None:
            profiler, self._profiler = self._profiler, None
            profiler.stop()  # a recording that was begun is written

    def _write(self, profiler: torch.profiler.profile) -> None:
        path = self.directory / f"step-{self._step}.json"
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(path))
        except OSError as error:
            # A profile is not worth a run.
            warn(f"{path}: the profile cannot be written ({error.strerror}); training goes on")
            return
        say(f"profile: {path}, to be opened in Perfetto or chrome://tracing")
