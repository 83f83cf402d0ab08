"""A stock PyTorch module through the Trainer: an MLP that learns to read digits.

    python examples/python_api.py          on the tpu device (XLA on a TPU, a GPU or the cpu)
    python examples/python_api.py cpu      on PyTorch's own cpu kernels: the same losses

Needs scikit-learn. Takes a few seconds; ends with an accuracy of about 0.96 on held-out digits. The loss of
every step is in runs/digits/metrics.jsonl; run it again and it says that it is finished.
"""

import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tputrain import LogConfig, OptimConfig, RunConfig, ScheduleConfig, Trainer, TrainerConfig


def accuracy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output.argmax(dim=1) == target).float().mean()


images, labels = load_digits(return_X_y=True)
digits = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16.0, torch.tensor(labels))
train, test = torch.utils.data.random_split(digits, [1500, 297], torch.Generator().manual_seed(0))

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

cfg = RunConfig(
    device=sys.argv[1] if len(sys.argv) > 1 else "auto",
    run_dir="runs/digits",
    trainer=TrainerConfig(steps=300, evaluate_every=100),
    optim=OptimConfig(learning_rate=3e-3, weight_decay=0.01),
    schedule=ScheduleConfig(warmup_steps=20),
    log=LogConfig(every=50),
)
trainer = Trainer(
    model,
    cfg,
    train_loader=DataLoader(train, batch_size=100, shuffle=True),
    val_loader=DataLoader(test, batch_size=99),
    metrics={"accuracy": accuracy},
)
trainer.fit()
print(f"accuracy on {len(test)} held-out digits: {trainer.validate()['accuracy']:.3f}")
