"""A plain PyTorch training loop on the tpu device. Nothing in it but the device's name knows of tputrain.

    python examples/plain_loop.py          on the tpu device (XLA on a TPU, a GPU or the cpu)
    python examples/plain_loop.py cpu      on PyTorch's own cpu kernels: the same losses

Needs scikit-learn. Takes a few seconds; ends with about 96 % of the held-out digits recognised.
"""

import sys

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

device = torch.device(sys.argv[1] if len(sys.argv) > 1 else "tpu")

images, labels = load_digits(return_X_y=True)
images = torch.tensor(images, dtype=torch.float32) / 16.0
labels = torch.tensor(labels)
order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
train, test = order[:1500], order[1500:]

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

for epoch in range(20):
    for rows in train[torch.randperm(len(train))].split(100):
        loss = F.cross_entropy(model(images[rows].to(device)), labels[rows].to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(
        f"epoch {epoch + 1:2d}  loss {loss.item():.4f}"
    )  # the only place where the host waits for the device

with torch.no_grad():
    guessed = model(images[test].to(device)).argmax(dim=1).cpu()
print(f"recognised {(guessed == labels[test]).float().mean():.1%} of {len(test)} digits")
