"""A run that hangs: `python -m tests.tputrain.hanging_run RUN_DIR step|data|interpreter`, at step 4 of 9."""

import ctypes
import sys

import torch
from torch import Tensor, nn

from tputrain import LogConfig, RunConfig, Trainer, TrainerConfig
from tputrain.watchdog import WatchdogConfig

HANGS_AT = 4


def hang(library: ctypes.CDLL) -> None:
    """Wait in C for ever: for a mutex that this thread holds."""
    mutex = ctypes.create_string_buffer(128)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)


class Model(nn.Module):
    def __init__(self, where: str):
        super().__init__()
        self.net, self.where, self.calls = nn.Linear(4, 2), where, 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == HANGS_AT and self.where != "data":
            # A CDLL gives the interpreter's lock away for the time of a call, a PyDLL keeps it.
            hang(ctypes.PyDLL(None) if self.where == "interpreter" else ctypes.CDLL(None))
        return self.net(inputs)


class Loader:
    def __init__(self, where: str):
        self.where = where

    def batch_at(self, step: int, micro: int) -> tuple[Tensor, Tensor]:
        if step + 1 == HANGS_AT and self.where == "data":
            hang(ctypes.CDLL(None))
        return torch.ones(2, 4), torch.tensor([0, 1])


if __name__ == "__main__":
    run_dir, where = sys.argv[1:]
    # With Python's lock held nothing winds the interpreter's timer up: it may still be that of the set-up.
    setup_seconds = 8.0 if where == "interpreter" else 60.0
    cfg = RunConfig(
        device="tpu" if where == "step" else "cpu",
        run_dir=run_dir,
        trainer=TrainerConfig(steps=9),
        log=LogConfig(every=1, progress="none"),
        watchdog=WatchdogConfig(step_seconds=0.5, wait_seconds=1.0, setup_seconds=setup_seconds),
    )
    Trainer(Model(where), cfg, train_loader=Loader(where)).fit()
