"""A run to be sent a signal: `python -m tests.tputrain.interrupted_run RUN_DIR WHERE`.

It prints `here` and then waits for a minute. WHERE: data, evaluation-data (in Python, where a signal's
handler runs), start, first-step, new-size, resumed (in C, as a compilation does), saving (until its
standard input is closed).
"""

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.tputrain.hanging_run import hang
from tputrain import CheckpointConfig, LogConfig, RunConfig, Trainer, TrainerConfig
from tputrain.callbacks.callback import Callback
from tputrain.signals import Interrupted, SignalWatch
from tputrain.snapshot import contents

STEPS = 9
AT = 5
"""Steps that are done when the wait begins."""


class Model(nn.Module):
    """Waits in its forward pass: in the first step; in the first evaluation of the process, which comes
    before that (start) or a few steps later (resumed); in training on the first batch of another size.
    """

    def __init__(self, where: str):
        super().__init__()
        self.net, self.where = nn.Linear(4, 3), where

    def forward(self, inputs: Tensor) -> Tensor:
        in_training = ("first-step", "new-size") if len(inputs) == 1 else ("first-step",)
        if self.where in (in_training if self.training else ("start", "resumed")):
            print("here", flush=True)
            hang(ctypes.CDLL(None))
        return self.net(inputs)


class Waiting:
    """A loader that waits before batch `at` (from 0)."""

    def __init__(self, loader: DataLoader, at: int):
        self.loader, self.at, self.given = loader, at, 0

    def __iter__(self) -> Iterator[list[Tensor]]:
        for batch in self.loader:
            if self.given == self.at:
                torch.rand(3)  # a draw that must count for nothing
                print("here", flush=True)
                threading.Event().wait(60)
            self.given += 1
            yield batch


class TerminatesAfterFour(Callback):
    """A run that ends in between two evaluations."""

    def on_step_end(self, trainer: Trainer) -> None:
        if trainer.step == 4:
            os.kill(os.getpid(), signal.SIGTERM)


def device_of(where: str) -> str:
    """Where such a run trains: on the cpu nothing is compiled for a size of batches."""
    return "tpu" if where == "new-size" else "cpu"


def build(run_dir: Path | str, where: str = "", device: str = "cpu") -> Trainer:
    """The trainer of the run; it goes wherever `where` does not make it wait."""
    torch.set_num_threads(1)
    torch.manual_seed(5)
    model = Model(where)
    samples = TensorDataset(torch.randn(9, 4), torch.randint(3, (9,)))
    # Two batches a step and five an epoch: the wait is in the middle of a step, or of an epoch's beginning.
    # The last batch of an epoch is a smaller one: it comes in step 3 first.
    train = Waiting(DataLoader(samples, batch_size=2, shuffle=True), 2 * AT + 1 if where == "data" else -1)
    # Two batches an evaluation: the wait is in the middle of the third one, at step AT + 1.
    evaluation = Waiting(DataLoader(samples, batch_size=5), 5 if where == "evaluation-data" else -1)
    cfg = RunConfig(
        device=device,
        run_dir=str(run_dir),
        trainer=TrainerConfig(steps=STEPS, accumulate=2, evaluate_every=3),
        checkpoint=CheckpointConfig(every=4),
        log=LogConfig(every=2, progress="none"),
    )
    return Trainer(model, cfg, train_loader=train, val_loader=evaluation)


if __name__ == "__main__":
    run_dir, where = sys.argv[1:]
    if where == "resumed":
        first = build(run_dir)
        first.callbacks.append(TerminatesAfterFour())
        with suppress(Interrupted):
            first.fit()
    trainer = build(run_dir, where, device_of(where))
    SignalWatch.grace = 0.5
    if where == "saving":
        write_state = contents.write_state

        def write_state_late(text: str, directory: Path) -> None:
            print("here", flush=True)
            sys.stdin.read()  # until whoever sends the signal has done so
            write_state(text, directory)

        contents.write_state = write_state_late
    trainer.fit()
