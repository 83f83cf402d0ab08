"""The optimizer of a configuration: PyTorch's own, decay where it belongs, its state made up front."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tputrain.config_checks import expect, expect_above, expect_at_least, expect_choice, expect_share
from tputrain.errors import UserError
from tputrain.optim.adafactor import Adafactor, initial_state
from tputrain.optim.groups import GroupConfig, parameter_groups
from tputrain.optim.joint import JointOptimizer
from tputrain.optim.master_weights import round_weights
from tputrain.optim.muon import Muon, MuonWithAdamW, split_groups
from tputrain.optim.schedule_free import build_schedule_free

OPTIMIZERS = ("adamw", "sgd", "adafactor", "muon", "schedulefree")


@dataclass(frozen=True)
class OptimConfig:
    """An optimizer by name, with its settings, and which parameters it trains how."""

    name: str = "adamw"
    """adamw (Loshchilov and Hutter, 2019); sgd with momentum; adafactor (Shazeer and Stern, 2018); muon
    (Jordan et al., 2024) for hidden matrices with adamw for the rest; schedulefree (Defazio et al., 2024)."""
    learning_rate: float = 1e-3
    """The highest; the schedule multiplies it."""
    weight_decay: float = 0.1
    """Of matrices only: norms, biases and what else has one dimension decay only where `groups` say so."""
    beta1: float = 0.9
    """adamw, and of the rest under muon: decay of the mean of gradients; schedulefree: interpolation."""
    beta2: float = 0.95
    """adamw, muon and schedulefree: decay of the mean of their squares."""
    eps: float = 1e-8
    """adamw, muon and schedulefree: added to the denominator."""
    momentum: float = 0.9
    """sgd; muon, which is best with 0.95."""
    groups: list[GroupConfig] = field(default_factory=list)
    """Other settings for some parameters, by patterns of their names; later ones win."""
    freeze: list[str] = field(default_factory=list)
    """Patterns of the names of parameters that are not trained."""
    master_weights: bool = False
    """The model's weights in bfloat16, for the optimizer to step float32 copies of them."""
    ema_decay: float | None = None
    """Evaluate and save an exponential moving average of the weights, such as 0.999; None: the weights."""

    def __post_init__(self) -> None:
        expect_choice("optim.name", self.name, OPTIMIZERS)
        expect_above("optim.learning_rate", self.learning_rate, 0.0)
        expect_at_least("optim.weight_decay", self.weight_decay, 0.0)
        expect_above("optim.eps", self.eps, 0.0)
        for key in ("beta1", "beta2", "momentum"):
            expect_share(f"optim.{key}", getattr(self, key))
            expect(getattr(self, key) < 1.0, f"optim.{key}", getattr(self, key), "a number below 1")
        if self.master_weights:
            has_averages = self.ema_decay is not None or self.name == "schedulefree"
            expect(
                not has_averages,
                "optim.master_weights",
                True,
                "false with optim.ema_decay or optim.name=schedulefree, which average the weights themselves",
            )
        if self.ema_decay is not None:
            is_share = 0.0 < self.ema_decay < 1.0
            expect(is_share, "optim.ema_decay", self.ema_decay, "a number between 0 and 1, or null")
            averages_itself = self.name == "schedulefree"
            expect(
                not averages_itself,
                "optim.ema_decay",
                self.ema_decay,
                "null with optim.name=schedulefree, which averages the weights itself",
            )


def build_optimizer(
    model: nn.Module, cfg: OptimConfig, counts_on_device: bool = False
) -> torch.optim.Optimizer:
    """The optimizer of `cfg` over the trainable parameters of `model`, which are already on their device.

    With `cfg.master_weights` the parameters are bfloat16 afterwards. `counts_on_device`: AdamW keeps its step
    count there (its fused form, equal but for rounding), so that no number of the host changes with it.
    """
    optimizer = _by_name(model, cfg, {"fused": True} if counts_on_device else {})
    if not cfg.master_weights:
        return optimizer
    create_state(optimizer)
    return round_weights(model, optimizer)


def _by_name(model: nn.Module, cfg: OptimConfig, of_adamw: dict[str, bool]) -> torch.optim.Optimizer:
    groups = parameter_groups(model, cfg.weight_decay, cfg.groups)
    betas = (cfg.beta1, cfg.beta2)
    match cfg.name:
        case "sgd":
            return torch.optim.SGD(groups, lr=cfg.learning_rate, momentum=cfg.momentum)
        case "adafactor":
            return Adafactor(groups, lr=cfg.learning_rate)
        case "muon":
            return _muon(model, groups, cfg)
        case "schedulefree":
            return build_schedule_free(groups, lr=cfg.learning_rate, betas=betas, eps=cfg.eps)
    return torch.optim.AdamW(groups, lr=cfg.learning_rate, betas=betas, eps=cfg.eps, **of_adamw)


def _muon(model: nn.Module, groups: list[dict[str, Any]], cfg: OptimConfig) -> MuonWithAdamW:
    hidden, others = split_groups(groups, model)
    if not hidden:
        raise UserError(
            "optim.name=muon: expected a model with trainable matrices between embeddings and output; "
            "optim.name=adamw trains any"
        )
    # Updates scaled to the size of AdamW's, so that one learning rate serves both (Liu et al., 2025).
    muon = Muon(hidden, lr=cfg.learning_rate, momentum=cfg.momentum, adjust_lr_fn="match_rms_adamw")
    betas = (cfg.beta1, cfg.beta2)
    adamw = torch.optim.AdamW(others, lr=cfg.learning_rate, betas=betas, eps=cfg.eps) if others else None
    return MuonWithAdamW(muon, adamw)


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
