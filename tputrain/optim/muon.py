"""Muon for the matrices inside a network, AdamW for everything else: one optimizer of two."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim._muon import _adjust_lr as adjusted_rate

from tputrain.optim.closure import evaluated
from tputrain.optim.joint import JointOptimizer
from tputrain.optim.orthogonal import orthogonalised


class Muon(torch.optim.Muon):
    """torch.optim.Muon, to the bit, which takes matrices that ranks have parts of, too."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; returns what `closure` gives."""
        loss = evaluated(closure)
        for group in self.param_groups:
            parameters: list[torch.Tensor] = []
            grads: list[torch.Tensor] = []
            momenta: list[torch.Tensor] = []
            self._init_group(group, parameters, grads, momenta)
            rate, momentum = group["lr"], group["momentum"]
            for grad, mean in zip(grads, momenta, strict=True):
                mean.lerp_(grad, 1 - momentum)
            ahead = [grad.lerp(mean, momentum) for grad, mean in zip(grads, momenta, strict=True)]
            updates = orthogonalised(
                ahead if group["nesterov"] else momenta,
                group["ns_coefficients"],
                group["ns_steps"],
                group["eps"],
            )
            for parameter, update in zip(parameters, updates, strict=True):
                parameter.mul_(1 - rate * group["weight_decay"])
                parameter.add_(update, alpha=-adjusted_rate(rate, group["adjust_lr_fn"], parameter.shape))
        return loss


class MuonWithAdamW(JointOptimizer):
    """`Muon` and `torch.optim.AdamW` over groups of their own, with one learning rate."""

    def __init__(self, muon: torch.optim.Muon, adamw: torch.optim.AdamW | None):
        super().__init__(*([muon] if adamw is None else [muon, adamw]))
        self.kind = type(self).__name__  # its parts never change, and checkpoints hold this


def split_groups(
    groups: Sequence[dict[str, Any]], model: nn.Module
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """`groups` twice: with what Muon is for, the hidden matrices of `model`, and with the rest."""
    hidden = hidden_matrices(model)
    ours: list[dict[str, Any]] = []
    others: list[dict[str, Any]] = []
    for group in groups:
        for destination, is_hidden in ((ours, True), (others, False)):
            members = [p for p in group["params"] if (id(p) in hidden) == is_hidden]
            if members:
                destination.append(group | {"params": members})
    return ours, others


def hidden_matrices(model: nn.Module) -> set[int]:
    """Two-dimensional `weight`s, but no embedding's nor the last linear layer's, the output."""
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    outside = [m for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)] + linear[-1:]
    excluded = {id(module.weight) for module in outside}
    return {
        id(parameter)
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if name == "weight" and parameter.dim() == 2 and id(parameter) not in excluded
    }
