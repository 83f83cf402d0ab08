"""Options and schedules whose numbers are tensors, such as `lr=torch.tensor(0.1)`: as JSON, and back."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only


def as_numbers(state: Any) -> Any:
    """`state` with numbers in the place of tensors."""
    return tree_map_only(Tensor, Tensor.tolist, state)


def like(saved: Any, own: Any) -> Any:
    """`saved`, which `as_numbers` gave, with tensors where `own` has them."""
    if isinstance(own, Tensor) and isinstance(saved, int | float | list):
        return torch.tensor(saved, dtype=own.dtype, device=own.device)
    if isinstance(own, dict) and isinstance(saved, dict):
        return {key: like(value, own.get(key)) for key, value in saved.items()}
    if isinstance(own, list | tuple) and isinstance(saved, list) and len(own) == len(saved):
        return [like(*pair) for pair in zip(saved, own, strict=True)]
    return saved
