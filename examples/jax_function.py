"""A JAX function inside a PyTorch model: one operation of the step's program, with its gradient.

    python examples/jax_function.py          on the tpu device (XLA on a TPU, a GPU or the cpu)
    python examples/jax_function.py cpu      the same step by step: jax_op works on cpu tensors too

Takes a few seconds. A recurrence h[t] = a * h[t-1] + x[t], which in PyTorch is a loop over time, is one
`jax.lax.associative_scan`; the model learns how fast a leaky sum forgets, from its inputs and outputs alone,
and ends with a decay of about 0.90. A Pallas kernel is used in the same way.
"""

import sys

import jax
import torch
from torch import Tensor, nn

from tpu_backend import jax_op


@jax_op
def leaky_sum(x: jax.Array, decay: jax.Array) -> jax.Array:
    """x (B, T), decay () -> (B, T): what is left of the past, plus the present."""

    def joined(earlier, later):
        return earlier[0] * later[0], earlier[1] * later[0] + later[1]

    decays = jax.numpy.broadcast_to(decay, x.shape)
    return jax.lax.associative_scan(joined, (decays, x), axis=1)[1]


class LeakySum(nn.Module):
    """A layer with one parameter: the logit of the decay."""

    def __init__(self) -> None:
        super().__init__()
        self.logit = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return leaky_sum(x, self.logit.sigmoid())


device = torch.device(sys.argv[1] if len(sys.argv) > 1 else "tpu")
torch.manual_seed(0)
inputs = torch.randn(32, 64).to(device)
targets = leaky_sum(inputs, torch.tensor(0.9).to(device))

model = LeakySum().to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
for step in range(100):
    loss = (model(inputs) - targets).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 20 == 19:
        print(f"step {step + 1:3d}  loss {loss.item():.6f}")  # the only place where the host waits
print(f"learned a decay of {model.logit.sigmoid().item():.2f}, the one behind the data is 0.90")
