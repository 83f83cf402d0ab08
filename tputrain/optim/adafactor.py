"""Adafactor whose step leaves the device alone."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tputrain.checkpoint.rows import is_distributed, local_part, summed
from tputrain.optim.closure import evaluated


class Adafactor(torch.optim.Adafactor):
    """torch.optim.Adafactor (Shazeer and Stern, 2018), with the same settings, state and formulas.

    PyTorch's step reads two norms of every parameter back to the host, to compute factors there, and so waits
    for the device twice a parameter. Here they stay on the device; results differ in the last digits.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; returns what `closure` gives."""
        loss = evaluated(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    if not state:
                        state.update(initial_state(parameter))
                    _update(parameter, parameter.grad, state, group)
        return loss


def initial_state(parameter: Tensor) -> dict[str, Tensor]:
    """What the first step of torch.optim.Adafactor makes: the step count stays on the host."""
    state = {"step": torch.zeros((), dtype=torch.float32)}
    if parameter.dim() < 2:
        return state | {"variance": torch.zeros_like(parameter)}
    return state | {"row_var": _zeros(parameter, -1), "col_var": _zeros(parameter, -2)}


def _zeros(parameter: Tensor, dim: int) -> Tensor:
    """Zeros of the parameter's shape, with 1 in `dim`, along which they are not divided among ranks."""
    shape, local = list(parameter.shape), list(local_part(parameter).shape)
    shape[dim] = local[dim] = 1
    zeros = torch.zeros(local, dtype=parameter.dtype, device=parameter.device)
    if not is_distributed(parameter):
        return zeros
    from torch.distributed.tensor import DTensor, Replicate

    mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
    divided = [not each.is_replicate() and each.dim == dim % parameter.dim() for each in placements]
    placements = [Replicate() if is_so else each for each, is_so in zip(placements, divided, strict=True)]
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        zeros, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
    )


def _update(parameter: Tensor, grad: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
    state["step"] += 1
    step, learning_rate = state["step"].item(), group["lr"]
    share = step ** group["beta2_decay"]  # of the newest gradient in the averages
    least, least_rms = group["eps"]
    least = torch.finfo(parameter.dtype).eps if least is None else least
    rate = min(learning_rate, step**-0.5) * _rms(parameter).clamp(min=least_rms)
    parameter.mul_(1 - learning_rate * group["weight_decay"])
    grad = -grad if group["maximize"] else grad
    variance = _averaged_square(grad, state, share, least)
    update = grad * variance.clamp(min=least**2).rsqrt()
    parameter.sub_(update * (rate / (_rms(update) / group["d"]).clamp(min=1.0)))


def _averaged_square(grad: Tensor, state: dict[str, Tensor], share: float, least: float) -> Tensor:
    square = grad.square()
    if grad.dim() < 2:
        return state["variance"].lerp_(square, share)
    rows = state["row_var"].lerp_(_mean(square, -1), share)
    columns = state["col_var"].lerp_(_mean(square, -2), share)
    return rows * columns / _mean(rows, -2).clamp(min=least)


def _mean(values: Tensor, dim: int) -> Tensor:
    """The mean over `dim`, which stays as one of size 1, over all ranks that have parts of it."""
    return summed(values.sum(dim=dim, keepdim=True)) / values.shape[dim]


def _rms(values: Tensor) -> Tensor:
    return (summed(values.square().sum()) / values.numel()).sqrt()
