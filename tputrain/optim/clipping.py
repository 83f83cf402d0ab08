"""Keeping gradients small enough for the step that they are taken for."""

from collections.abc import Sequence

from torch import Tensor, nn


def clip_gradients(
    parameters: Sequence[nn.Parameter], max_norm: float | None, max_value: float | None
) -> Tensor:
    """Bound each gradient element to +-`max_value`, then scale all down to the norm `max_norm`; None: not.

    Returns the norm of all gradients before either, a scalar on the device: nothing is read.
    """
    before = norm = _norm(parameters)
    if max_value is not None:
        nn.utils.clip_grad_value_(parameters, max_value)
        norm = _norm(parameters)
    if max_norm is not None:
        nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return before


def _norm(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Of all gradients together; of those of half precision in float32."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = nn.utils.get_total_norm([g.float() if g.dtype.itemsize == 2 else g for g in gradients])
    # Of parameters that ranks have parts of, each knows the norm of its own: this adds them up.
    return norm.full_tensor() if isinstance(norm, Tensor) and hasattr(norm, "full_tensor") else norm
