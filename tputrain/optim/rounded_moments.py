"""AdamW whose means, of gradients and of their squares, may take 2 bytes a parameter instead of 4."""

from collections.abc import Callable, Collection, Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from tputrain.optim.closure import evaluated

MEAN, SQUARES = "exp_avg", "exp_avg_sq"


class RoundedAdamW(torch.optim.AdamW):
    """torch.optim.AdamW that keeps MEAN, SQUARES or both in bfloat16 between steps; a step computes as ever.

    With a `beta2` near 1 the squares must stay exact: a step changes them by less than bfloat16 can tell.
    """

    kind: ClassVar[str] = "AdamW"
    """Its checkpoints are AdamW's: a run may go on with either."""

    def __init__(self, groups: Iterable[Any], rounded_state: Collection[str], **options: Any):
        """`rounded_state`: which of the two."""
        self.rounded_state = frozenset(rounded_state)
        super().__init__(groups, **options)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; returns what `closure` gives."""
        loss = evaluated(closure)
        for group in self.param_groups:
            parameters, grads, means, squares, highest, steps = ([] for _ in range(6))  # type: ignore[var-annotated]
            has_complex = self._init_group(group, parameters, grads, means, squares, highest, steps)
            kept = {MEAN: means, SQUARES: squares}
            exact = {
                key: [value.to(p.dtype) for value, p in zip(values, parameters, strict=True)]
                for key, values in kept.items()
            }
            adamw(
                parameters,
                grads,
                exact[MEAN],
                exact[SQUARES],
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
            for key in self.rounded_state:
                for parameter, value, new in zip(parameters, kept[key], exact[key], strict=True):
                    if value.dtype == torch.bfloat16:
                        value.copy_(new)
                    else:  # PyTorch has just made it
                        self.state[parameter][key] = rounded(new)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take what `state_dict` gave, here or of an AdamW; PyTorch's own way casts to the weights' dtype."""
        super().load_state_dict(state_dict)
        for state in self.state.values():
            state.update({key: rounded(state[key]) for key in self.rounded_state & state.keys()})


def rounded(value: Tensor) -> Tensor:
    """As it is kept."""
    return value.bfloat16()
