"""A small run that can be killed: `python -m tests.tputrain.resumable_run RUN_DIR [MOMENT STEP]`.

It has all that makes resuming hard: dropout, a shuffling DataLoader whose epochs end inside steps,
accumulation with unequal weights, tied weights, momentum. MOMENT is where the process sends itself a signal
at STEP: kill-step, kill-save, kill-seal, kill-evaluation, int-step, term-step, term-evaluation, term-start.
"""

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tputrain import CheckpointConfig, LogConfig, OptimConfig, RunConfig, Trainer, TrainerConfig
from tputrain.callbacks.callback import Callback
from tputrain.checkpoint import store
from tputrain.snapshot import contents

STEPS = 14
NUM_SAMPLES, MICRO_BATCH = 22, 3


class TiedModel(nn.Module):
    """An encoder and a decoder that share one matrix, with dropout between them."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)
        self.dropout = nn.Dropout(0.3)
        self.decode = nn.Linear(6, 6)
        self.decode.weight = self.encode.weight

    def forward(self, values: Tensor) -> Tensor:
        return self.decode(self.dropout(torch.tanh(self.norm(self.encode(values)))))


class SignalAt(Callback):
    """Sends this process a signal at one moment of a run."""

    def __init__(self, moment: str, step: int):
        self.number = {"kill": signal.SIGKILL, "int": signal.SIGINT, "term": signal.SIGTERM}[
            moment.split("-")[0]
        ]
        self.where, self.step = moment.split("-")[1], step

    def send(self, where: str, step: int) -> None:
        if (where, step) == (self.where, self.step):
            os.kill(os.getpid(), self.number)

    def on_fit_start(self, trainer: Trainer) -> None:
        self.send("start", trainer.step)

    def on_step_end(self, trainer: Trainer) -> None:
        self.send("step", trainer.step)


class Evaluation:
    """Validation batches that may send a signal between the first and the second."""

    def __init__(self, batches: list[list[Tensor]]):
        self.batches = batches
        self.trainer: Trainer | None = None
        self.signals: SignalAt | None = None

    def __iter__(self) -> Iterator[list[Tensor]]:
        for number, batch in enumerate(self.batches):
            if number == 1 and self.signals is not None and self.trainer is not None:
                self.signals.send("evaluation", self.trainer.step)
            yield batch


def build(run_dir: Path | str | None, signals: SignalAt | None = None, **changes: object) -> Trainer:
    """The trainer of the run; the same arguments give the same run in every process."""
    torch.set_num_threads(1)
    torch.manual_seed(5)
    model = TiedModel()
    inputs = torch.randn(NUM_SAMPLES, 6)
    targets = (inputs.sum(dim=1) > 0).long()
    targets[::7] = -100
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=MICRO_BATCH, shuffle=True)
    settings: dict = {
        "seed": 3,
        "device": "cpu",
        "run_dir": None if run_dir is None else str(run_dir),
        "trainer": TrainerConfig(steps=STEPS, accumulate=2, evaluate_every=4, max_grad_norm=0.5),
        "optim": OptimConfig(learning_rate=0.03),
        "checkpoint": CheckpointConfig(every=3, keep_last=3),
        "log": LogConfig(every=5, progress="none"),
    }
    evaluation = Evaluation([[inputs[:8], targets[:8]], [inputs[8:], targets[8:]]])
    trainer = Trainer(
        model,
        RunConfig(**(settings | changes)),
        train_loader=loader,
        val_loader=evaluation,
        callbacks=[] if signals is None else [signals],
    )
    evaluation.trainer, evaluation.signals = trainer, signals
    if signals is not None:
        _send_inside_saves(signals)
    return trainer


def _send_inside_saves(signals: SignalAt) -> None:
    write_state = contents.write_state

    def write_state_or_die(text: str, directory: Path) -> None:
        # The model and the optimizer are written, the rest is not. The trainer may be steps ahead.
        signals.send("save", json.loads(text)["step"])
        write_state(text, directory)

    contents.write_state = write_state_or_die
    seal = store.seal

    def seal_or_die(directory: Path, *more: object) -> None:
        # All files are written, none is hashed.
        signals.send("seal", int(directory.name.rpartition("-")[2]))
        seal(directory, *more)

    store.seal = seal_or_die


if __name__ == "__main__":
    directory, *moment = sys.argv[1:]
    build(directory, SignalAt(moment[0], int(moment[1])) if moment else None).fit()
