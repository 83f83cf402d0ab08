"""Keeping gradients small enough for the step that they are taken for."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


def clip_gradients(
    parameters: Sequence[nn.Parameter], max_norm: float | None, max_value: float | None
) -> Tensor:
    """Bound each gradient element to +-`max_value`, then scale all down to the norm `max_norm`; None: not.

    Returns the norm of all gradients before either, a scalar on the device: nothing is read.
    """
    before = norm = _norm(parameters)
    alike = _by_mesh(parameters)
    if max_value is not None:
        for each in alike:
            nn.utils.clip_grad_value_(each, max_value)
        norm = _norm(parameters)
    if max_norm is not None:
        for each in alike:
            nn.utils.clip_grads_with_norm_(each, max_norm, norm)
    return before


def _norm(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Of all gradients together; of those of half precision in float32."""
    norms = []
    for alike in _by_mesh(parameters):
        gradients = [p.grad for p in alike if p.grad is not None]
        norm = nn.utils.get_total_norm([g.float() if g.dtype.itemsize == 2 else g for g in gradients])
        # Of parameters that ranks have parts of, each knows the norm of its own: this adds them up.
        norms.append(
            norm.full_tensor() if isinstance(norm, Tensor) and hasattr(norm, "full_tensor") else norm
        )
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))


def _by_mesh(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Together those that the same ranks have parts of: PyTorch takes no others at once.

    With tensor parallelism some are cut over more ranks than others.
    """
    alike: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        alike.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    return list(alike.values())
