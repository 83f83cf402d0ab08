"""What is done with any optimizer: its state made up front, its learning rates set."""

from typing import Any

import torch

from tputrain.optim.adafactor import initial_state
from tputrain.optim.joint import JointOptimizer
from tputrain.optim.rounded_moments import RoundedAdamW, rounded


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Give every parameter group its share of `learning_rate`: all of it, or its `lr_scale`."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group.get("lr_scale", 1.0)


def other_rates(optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """Those of the parameter groups after the first, by name, where they differ from the first one's."""
    first, *others = (float(group["lr"]) for group in optimizer.param_groups)
    if all(rate == first for rate in others):
        return {}
    return {f"learning_rate_group_{number}": rate for number, rate in enumerate(others, 1)}


@torch.no_grad()
def create_state(optimizer: torch.optim.Optimizer) -> None:
    """Give the optimizer the state that its first step would make, in PyTorch's own form.

    Otherwise the first step of every process, also of a resumed one, would be another program than the rest,
    and floating-point results differ between programs. Optimizers other than those of `OptimConfig`, and
    schedule-free ones, whose state begins with the values of the parameters, make theirs at their first step.
    """
    for part in optimizer.parts if isinstance(optimizer, JointOptimizer) else [optimizer]:
        for group in part.param_groups:
            for parameter in group["params"]:
                if part.state.get(parameter) or not parameter.requires_grad:
                    continue
                if state := _first_state(part, parameter, group):
                    part.state[parameter].update(state)


def _first_state(
    optimizer: torch.optim.Optimizer, parameter: torch.Tensor, group: dict[str, Any]
) -> dict[str, torch.Tensor]:
    if not type(optimizer).__module__.startswith(("torch.optim", "tputrain.")):
        return {}  # a subclass may keep more, and makes it where there is none yet
    if isinstance(optimizer, RoundedAdamW):
        state = _adam_state(parameter, group)
        return state | {key: rounded(state[key]) for key in optimizer.rounded_state}
    if isinstance(optimizer, torch.optim.Adam):  # AdamW is one
        return _adam_state(parameter, group)
    if isinstance(optimizer, torch.optim.Adafactor):
        return initial_state(parameter)
    # From zero the first step leaves exactly the gradient in a momentum buffer, as SGD's first step does.
    has_buffer = isinstance(optimizer, torch.optim.SGD) and group["momentum"] and not group["dampening"]
    if has_buffer or isinstance(optimizer, torch.optim.Muon):
        return {"momentum_buffer": torch.zeros_like(parameter)}
    return {}


def _adam_state(parameter: torch.Tensor, group: dict) -> dict[str, torch.Tensor]:
    # The step count stays on the host unless the optimizer is to read it on the device.
    device = parameter.device if group["capturable"] or group["fused"] else torch.device("cpu")
    state = {
        "step": torch.zeros((), dtype=torch.float32, device=device),
        "exp_avg": torch.zeros_like(parameter),
        "exp_avg_sq": torch.zeros_like(parameter),
    }
    if group["amsgrad"]:
        state["max_exp_avg_sq"] = torch.zeros_like(parameter)
    return state
