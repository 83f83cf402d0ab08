"""A model and a loss of your own: a small convolutional network that says how sure it is.

    python examples/custom_model.py          on the tpu device (XLA on a TPU, a GPU or the cpu)
    python examples/custom_model.py cpu      on PyTorch's own cpu kernels: the same losses

Needs scikit-learn. Takes a few seconds; ends with about 98 % of the held-out digits recognised. Any nn.Module
on (input, target) batches will do, and any function of (output, target) that gives the batch's mean as a
scalar. Write both of tensors alone: a `loss.item()` in either would make the host wait for the device in
every step.
"""

import sys

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tputrain import LogConfig, OptimConfig, RunConfig, ScheduleConfig, Trainer, TrainerConfig


class SmallConvNet(nn.Module):
    """Images (B, 1, 8, 8) to logits (B, 10)."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 16, kernel_size=3, padding=1)
        self.second = nn.Conv2d(16, 32, kernel_size=3, padding=1)
        self.head = nn.Linear(32 * 2 * 2, 10)

    def forward(self, images: Tensor) -> Tensor:
        hidden = F.max_pool2d(F.relu(self.first(images)), 2)  # (B, 16, 4, 4)
        hidden = F.max_pool2d(F.relu(self.second(hidden)), 2)  # (B, 32, 2, 2)
        return self.head(hidden.flatten(1))


def focal_loss(logits: Tensor, labels: Tensor, gamma: float = 2.0) -> Tensor:
    """Cross-entropy in which what is recognised already counts less (Lin et al., 2017)."""
    log_probability = logits.log_softmax(dim=1).gather(1, labels[:, None]).squeeze(1)
    return (-((1.0 - log_probability.exp()) ** gamma) * log_probability).mean()


images, labels = load_digits(return_X_y=True)
images = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16.0
digits = TensorDataset(images, torch.tensor(labels))
train, test = torch.utils.data.random_split(digits, [1500, 297], torch.Generator().manual_seed(0))

torch.manual_seed(0)
cfg = RunConfig(
    device=sys.argv[1] if len(sys.argv) > 1 else "auto",
    trainer=TrainerConfig(steps=300, evaluate_every=None, metrics=["accuracy"]),
    optim=OptimConfig(learning_rate=1e-2),
    schedule=ScheduleConfig(warmup_steps=20),
    log=LogConfig(every=50),
)
trainer = Trainer(
    SmallConvNet(),
    cfg,
    train_loader=DataLoader(train, batch_size=100, shuffle=True),
    val_loader=DataLoader(test, batch_size=99),
    loss_fn=focal_loss,
)
trainer.fit()
print(f"recognised {trainer.validate()['accuracy']:.1%} of {len(test)} digits")
