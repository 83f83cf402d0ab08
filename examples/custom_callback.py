"""A callback of your own: it hears of losses, asks for evaluations and the end, and survives a resume.

    python examples/custom_callback.py          on the tpu device (XLA on a TPU, a GPU or the cpu)
    python examples/custom_callback.py cpu      on PyTorch's own cpu kernels

Needs scikit-learn. Takes a few seconds; ends the run once three quarters of the first loss are gone and an
evaluation agrees, well before its 300 steps. Its state is in the checkpoint in runs/callback.
"""

import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tputrain import Callback, OptimConfig, RunConfig, ScheduleConfig, Trainer, TrainerConfig


class GoodEnough(Callback):
    """Ends a run when the evaluation's loss is below `share` of the first step's loss."""

    def __init__(self, share: float):
        self.share = share
        self.bar: float | None = None

    def on_log(self, trainer, records):
        # The values of all steps since the last log step, on the host already: reading them costs nothing.
        if self.bar is None:
            self.bar = self.share * records[0]["loss"]
        if records[-1]["loss"] < self.bar:
            trainer.control.evaluate = True

    def on_evaluate(self, trainer, result):
        if self.bar is not None and result["loss"] < self.bar:
            trainer.control.stop = True
            print(f"good enough at step {trainer.step}: loss {result['loss']:.3f}, asked for {self.bar:.3f}")

    def state_dict(self):
        return {"bar": self.bar}

    def load_state_dict(self, state):
        self.bar = state["bar"]


images, labels = load_digits(return_X_y=True)
digits = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16.0, torch.tensor(labels))
train, test = torch.utils.data.random_split(digits, [1500, 297], torch.Generator().manual_seed(0))

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

cfg = RunConfig(
    device=sys.argv[1] if len(sys.argv) > 1 else "auto",
    run_dir="runs/callback",
    trainer=TrainerConfig(steps=300, evaluate_every=None, metrics=["accuracy"]),
    optim=OptimConfig(learning_rate=3e-3),
    schedule=ScheduleConfig(warmup_steps=20),
)
trainer = Trainer(
    model,
    cfg,
    train_loader=DataLoader(train, batch_size=100, shuffle=True),
    val_loader={"held-out": DataLoader(test, batch_size=99)},
    callbacks=[GoodEnough(0.25)],
)
trainer.fit()
