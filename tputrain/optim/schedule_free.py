"""Schedule-free AdamW (Defazio et al., 2024), from the package of its authors."""

from typing import Any

import torch

from tputrain.errors import UserError

PROGRESS = ("k", "weight_sum", "lr_max", "scheduled_lr")
"""What the package counts among a group's options and changes at every step."""


def build_schedule_free(groups: list[dict[str, Any]], **settings: Any) -> torch.optim.Optimizer:
    """An AdamWScheduleFree in its training mode. Raises UserError where the package is not installed."""
    try:
        from schedulefree import AdamWScheduleFree
    except ImportError:
        raise UserError(
            "optim.name=schedulefree: expected the package schedulefree: pip install 'tputrain[schedulefree]'"
        ) from None
    optimizer = AdamWScheduleFree(groups, **settings)
    optimizer.train()
    return optimizer


def progress_options(optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
    """The options of the optimizer's groups that are not settings but say how far it has come."""
    return tuple(key for key in PROGRESS if key in optimizer.param_groups[0])


def changes_weights_to_evaluate(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer is one that trains at other weights than those to be evaluated and saved."""
    return all(callable(getattr(optimizer, name, None)) for name in ("train", "eval"))
