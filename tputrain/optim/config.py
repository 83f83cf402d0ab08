"""The optimizers by name, decay where it belongs: a configuration each, which builds its own."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import nn

from tputrain.config_checks import expect, expect_above, expect_at_least, expect_choice, expect_share
from tputrain.errors import UserError
from tputrain.kinds import Family
from tputrain.optim.adafactor import Adafactor
from tputrain.optim.groups import GroupConfig, parameter_groups
from tputrain.optim.master_weights import round_weights
from tputrain.optim.muon import Muon, MuonWithAdamW, split_groups
from tputrain.optim.optimizer import create_state
from tputrain.optim.rounded_moments import MEAN, SQUARES, RoundedAdamW
from tputrain.optim.schedule_free import build_schedule_free

Groups = list[dict[str, Any]]

_MOST_BETA2 = 0.99
"""With means of squares in bfloat16. It has 8 significant bits: with 0.99 steps of falling gradients are 4 %
off, with 0.999 the mean of squares does not fall any more."""


@dataclass(frozen=True)
class OptimConfig(Family, group="optim", by="name"):
    """An optimizer by name, with its settings, and which parameters it trains how."""

    name: str = "adamw"
    """adamw, sgd, adafactor, muon or schedulefree."""
    learning_rate: float = 1e-3
    """The highest; the schedule multiplies it."""
    weight_decay: float = 0.1
    """Of matrices only: norms, biases and what else has one dimension decay only where `groups` say so."""
    groups: list[GroupConfig] = field(default_factory=list)
    """Other settings for some parameters, by patterns of their names; later ones win."""
    freeze: list[str] = field(default_factory=list)
    """Patterns of the names of parameters that are not trained."""
    master_weights: bool = False
    """The model's weights in bfloat16, for the optimizer to step float32 copies of them."""
    ema_decay: float | None = None
    """Evaluate and save an exponential moving average of the weights, such as 0.999; None: the weights."""

    computes_on_device: ClassVar[bool] = False
    """Whether a step computes nothing on the host with the step's number or rate."""

    def __post_init__(self) -> None:
        expect_above("optim.learning_rate", self.learning_rate, 0.0)
        expect_at_least("optim.weight_decay", self.weight_decay, 0.0)
        if self.ema_decay is not None:
            is_share = 0.0 < self.ema_decay < 1.0
            expect(is_share, "optim.ema_decay", self.ema_decay, "a number between 0 and 1, or null")
        expect(
            not self.master_weights or self.ema_decay is None,
            "optim.master_weights",
            self.master_weights,
            "false with optim.ema_decay, which averages the weights themselves",
        )

    def build(self, model: nn.Module, counts_on_device: bool = False) -> torch.optim.Optimizer:
        """The optimizer over the trainable parameters of `model`, which are already on their device.

        With `master_weights` the parameters are bfloat16 afterwards. `counts_on_device`: AdamW keeps its step
        count there (its fused form, equal but for rounding), so that no number of the host changes with it.
        """
        groups = parameter_groups(model, self.weight_decay, self.groups, self.freeze)
        optimizer = self._over(groups, model, counts_on_device)
        if not self.master_weights:
            return optimizer
        create_state(optimizer)
        return round_weights(model, optimizer)

    def _over(self, groups: Groups, model: nn.Module, counts_on_device: bool) -> torch.optim.Optimizer:
        raise NotImplementedError

    @property
    def state_bytes(self) -> float:
        """Bytes of optimizer state for each float32 element, without an average of weights."""
        raise NotImplementedError


@dataclass(frozen=True)
class AdamWConfig(OptimConfig, names=("adamw",)):
    """AdamW (Loshchilov and Hutter, 2019)."""

    name: str = "adamw"
    beta1: float = 0.9
    """Decay of the mean of gradients."""
    beta2: float = 0.95
    """Decay of the mean of their squares."""
    eps: float = 1e-8
    """Added to the denominator."""
    mean_dtype: str = "float32"
    """float32; or bfloat16: the mean of gradients takes 2 bytes a parameter instead of 4."""
    squares_dtype: str = "float32"
    """float32; or bfloat16, with beta2 up to 0.99: the mean of their squares takes 2 bytes instead of 4."""

    computes_on_device: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_adam(self.beta1, self.beta2, self.eps)
        expect_choice("optim.mean_dtype", self.mean_dtype, ("float32", "bfloat16"))
        expect_choice("optim.squares_dtype", self.squares_dtype, ("float32", "bfloat16"))
        expect(
            self.squares_dtype == "float32" or self.beta2 <= _MOST_BETA2,
            "optim.beta2",
            self.beta2,
            f"at most {_MOST_BETA2} with optim.squares_dtype=bfloat16, in which smaller changes are lost; "
            "or optim.squares_dtype=float32",
        )

    @property
    def state_bytes(self) -> float:
        """Bytes of optimizer state for each float32 element: two moments."""
        return 8.0 - 2.0 * len(self._rounded_state)

    @property
    def _rounded_state(self) -> list[str]:
        dtypes = {MEAN: self.mean_dtype, SQUARES: self.squares_dtype}
        return [key for key, dtype in dtypes.items() if dtype == "bfloat16"]

    def _over(self, groups: Groups, model: nn.Module, counts_on_device: bool) -> torch.optim.Optimizer:
        betas = (self.beta1, self.beta2)
        # Of 16-bit weights, too: the other form rounds to 16 bit after each of its operations.
        has_16_bit = any(each.dtype.itemsize == 2 for group in groups for each in group["params"])
        options: dict[str, Any] = {"lr": self.learning_rate, "betas": betas, "eps": self.eps}
        if counts_on_device or has_16_bit:
            options["fused"] = True
        rounded = self._rounded_state
        return RoundedAdamW(groups, rounded, **options) if rounded else torch.optim.AdamW(groups, **options)


@dataclass(frozen=True)
class SgdConfig(OptimConfig, names=("sgd",)):
    """Stochastic gradient descent with momentum."""

    name: str = "sgd"
    momentum: float = 0.9

    computes_on_device: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_decay("momentum", self.momentum)

    @property
    def state_bytes(self) -> float:
        """Bytes of optimizer state for each float32 element: its momentum."""
        return 4.0

    def _over(self, groups: Groups, model: nn.Module, counts_on_device: bool) -> torch.optim.Optimizer:
        return torch.optim.SGD(groups, lr=self.learning_rate, momentum=self.momentum)


@dataclass(frozen=True)
class AdafactorConfig(OptimConfig, names=("adafactor",)):
    """Adafactor (Shazeer and Stern, 2018)."""

    name: str = "adafactor"

    @property
    def state_bytes(self) -> float:
        """Bytes of optimizer state for each float32 element: only rows and columns are kept."""
        return 0.1

    def _over(self, groups: Groups, model: nn.Module, counts_on_device: bool) -> torch.optim.Optimizer:
        return Adafactor(groups, lr=self.learning_rate)


@dataclass(frozen=True)
class MuonConfig(OptimConfig, names=("muon",)):
    """Muon (Jordan et al., 2024) for hidden matrices, with AdamW for the rest."""

    name: str = "muon"
    beta1: float = 0.9
    """AdamW, of the rest: decay of the mean of gradients."""
    beta2: float = 0.95
    """AdamW, of the rest: decay of the mean of their squares."""
    eps: float = 1e-8
    """AdamW, of the rest: added to the denominator."""
    momentum: float = 0.9
    """Best with 0.95."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_adam(self.beta1, self.beta2, self.eps)
        _check_decay("momentum", self.momentum)

    @property
    def state_bytes(self) -> float:
        """Bytes of optimizer state for each float32 element: the momentum of hidden matrices, most of all."""
        return 4.0

    def _over(self, groups: Groups, model: nn.Module, counts_on_device: bool) -> torch.optim.Optimizer:
        hidden, others = split_groups(groups, model)
        if not hidden:
            raise UserError(
                "optim.name=muon: expected a model with trainable matrices between embeddings and output; "
                "optim.name=adamw trains any"
            )
        # Updates scaled to the size of AdamW's, so that one learning rate serves both (Liu et al., 2025).
        rate, momentum = self.learning_rate, self.momentum
        muon = Muon(hidden, lr=rate, momentum=momentum, adjust_lr_fn="match_rms_adamw")
        betas = (self.beta1, self.beta2)
        adamw = torch.optim.AdamW(others, lr=rate, betas=betas, eps=self.eps) if others else None
        return MuonWithAdamW(muon, adamw)


@dataclass(frozen=True)
class ScheduleFreeConfig(OptimConfig, names=("schedulefree",)):
    """AdamW without a schedule (Defazio et al., 2024), which averages the weights itself."""

    name: str = "schedulefree"
    beta1: float = 0.9
    """Interpolation between the weights and their average."""
    beta2: float = 0.95
    """Decay of the mean of the gradients' squares."""
    eps: float = 1e-8
    """Added to the denominator."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_adam(self.beta1, self.beta2, self.eps)
        averages = "with optim.name=schedulefree, which averages the weights itself"
        expect(self.ema_decay is None, "optim.ema_decay", self.ema_decay, f"null {averages}")
        expect(not self.master_weights, "optim.master_weights", True, f"false {averages}")

    @property
    def state_bytes(self) -> float:
        """Bytes of optimizer state for each float32 element: two float32 values."""
        return 8.0

    def _over(self, groups: Groups, model: nn.Module, counts_on_device: bool) -> torch.optim.Optimizer:
        betas = (self.beta1, self.beta2)
        return build_schedule_free(groups, lr=self.learning_rate, betas=betas, eps=self.eps)


def _check_adam(beta1: float, beta2: float, eps: float) -> None:
    _check_decay("beta1", beta1)
    _check_decay("beta2", beta2)
    expect_above("optim.eps", eps, 0.0)


def _check_decay(key: str, value: float) -> None:
    expect_share(f"optim.{key}", value)
    expect(value < 1.0, f"optim.{key}", value, "a number below 1")
