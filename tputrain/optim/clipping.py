"""Keeping gradients small enough for the step that they are taken for."""

from collections.abc import Sequence

from torch import Tensor, nn


def clip_gradients(
    parameters: Sequence[nn.Parameter], max_norm: float | None, max_value: float | None
) -> Tensor:
    """Bound each gradient element to +-`max_value`, then scale all down to the norm `max_norm`; None: not.

    Returns the norm of all gradients before either, a scalar on the device: nothing is read.
    """
    if max_value is None and max_norm is not None:
        return nn.utils.clip_grad_norm_(parameters, max_norm)  # it gives the norm as well
    norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    if max_value is not None:
        nn.utils.clip_grad_value_(parameters, max_value)
        if max_norm is not None:
            nn.utils.clip_grad_norm_(parameters, max_norm)
    return norm
