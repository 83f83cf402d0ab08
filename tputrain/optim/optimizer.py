"""The optimizer of a configuration: PyTorch's own, decay where it belongs, its state made up front."""

from dataclasses import dataclass

import torch
from torch import nn

from tputrain.config_checks import expect, expect_above, expect_at_least, expect_choice, expect_share

OPTIMIZERS = ("adamw", "sgd")


@dataclass(frozen=True)
class OptimConfig:
    """AdamW (Loshchilov and Hutter, 2019) or SGD with momentum, as torch.optim has them."""

    name: str = "adamw"
    """adamw or sgd."""
    learning_rate: float = 1e-3
    """The highest; the schedule multiplies it."""
    weight_decay: float = 0.1
    """Of matrices only: norms, biases and whatever else has one dimension are never decayed."""
    beta1: float = 0.9
    """adamw: decay of the mean of gradients."""
    beta2: float = 0.95
    """adamw: decay of the mean of their squares."""
    eps: float = 1e-8
    """adamw: added to the denominator."""
    momentum: float = 0.9
    """sgd."""

    def __post_init__(self) -> None:
        expect_choice("optim.name", self.name, OPTIMIZERS)
        expect_above("optim.learning_rate", self.learning_rate, 0.0)
        expect_at_least("optim.weight_decay", self.weight_decay, 0.0)
        expect_above("optim.eps", self.eps, 0.0)
        for key in ("beta1", "beta2", "momentum"):
            expect_share(f"optim.{key}", getattr(self, key))
            expect(getattr(self, key) < 1.0, f"optim.{key}", getattr(self, key), "a number below 1")


def build_optimizer(model: nn.Module, cfg: OptimConfig) -> torch.optim.Optimizer:
    """The optimizer of `cfg` over the trainable parameters of `model`, which are already on their device."""
    groups = decay_groups(model, cfg.weight_decay)
    if cfg.name == "sgd":
        return torch.optim.SGD(groups, lr=cfg.learning_rate, momentum=cfg.momentum)
    return torch.optim.AdamW(groups, lr=cfg.learning_rate, betas=(cfg.beta1, cfg.beta2), eps=cfg.eps)


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Parameter groups: those that decay, and those that do not (under two dimensions, or in a norm)."""
    in_norms = {
        id(parameter)
        for module in model.modules()
        if "Norm" in type(module).__name__
        for parameter in module.parameters(recurse=False)
    }
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    decayed = [p for p in trainable if p.dim() >= 2 and id(p) not in in_norms]
    kept = [p for p in trainable if p.dim() < 2 or id(p) in in_norms]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": kept, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


@torch.no_grad()
def create_state(optimizer: torch.optim.Optimizer) -> None:
    """Give Adam, AdamW and SGD the state that their first step would make, in PyTorch's own form.

    Otherwise the first step of every process, also of a resumed one, would be another program than the rest,
    and floating-point results differ between programs. Other optimizers make theirs at their first step.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if optimizer.state.get(parameter) or not parameter.requires_grad:
                continue
            if isinstance(optimizer, torch.optim.Adam):  # AdamW is one
                optimizer.state[parameter].update(_adam_state(parameter, group))
            elif isinstance(optimizer, torch.optim.SGD) and group["momentum"] and not group["dampening"]:
                # From zero the first step leaves exactly the gradient here, as PyTorch's first step does.
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


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
