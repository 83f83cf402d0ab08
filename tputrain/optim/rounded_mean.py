"""AdamW whose mean of gradients takes 2 bytes a parameter instead of 4."""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from tputrain.optim.closure import evaluated

_ROUNDED = "exp_avg"


class RoundedMeanAdamW(torch.optim.AdamW):
    """torch.optim.AdamW that keeps `exp_avg` in bfloat16 between steps; a step computes as ever.

    The mean of squares stays exact: with a `beta2` near 1 a step changes it by less than bfloat16 can tell.
    """

    kind: ClassVar[str] = "AdamW"
    """Its checkpoints are AdamW's: a run may go on with either."""
    rounded_state: ClassVar[frozenset[str]] = frozenset({_ROUNDED})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; returns what `closure` gives."""
        loss = evaluated(closure)
        for group in self.param_groups:
            parameters, grads, means, squares, highest, steps = ([] for _ in range(6))  # type: ignore[var-annotated]
            has_complex = self._init_group(group, parameters, grads, means, squares, highest, steps)
            exact = [mean.to(p.dtype) for mean, p in zip(means, parameters, strict=True)]
            adamw(
                parameters,
                grads,
                exact,
                squares,
                highest,
                steps,
                foreach=group["foreach"],
                capturable=group["capturable"],
                differentiable=group["differentiable"],
                fused=group["fused"],
                grad_scale=getattr(self, "grad_scale", None),
                found_inf=getattr(self, "found_inf", None),
                has_complex=has_complex,
                amsgrad=group["amsgrad"],
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=group["maximize"],
            )
            for parameter, mean, new in zip(parameters, means, exact, strict=True):
                if mean.dtype == torch.bfloat16:
                    mean.copy_(new)
                else:  # PyTorch has just made it
                    self.state[parameter][_ROUNDED] = rounded(new)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take what `state_dict` gave, here or of an AdamW; PyTorch's own way casts to the weights' dtype."""
        super().load_state_dict(state_dict)
        for state in self.state.values():
            if _ROUNDED in state:
                state[_ROUNDED] = rounded(state[_ROUNDED])


def rounded(mean: Tensor) -> Tensor:
    """As it is kept."""
    return mean.bfloat16()
