"""CTC loss. Lengths in lists become tensors, so that no program depends on a length. Targets become one row a
sample.
"""

from itertools import accumulate

import torch
import torch.nn.functional as F

_aten = torch.ops.aten


def _on_device(values, like):
    return torch.tensor(values, dtype=torch.int64).to(like.device)


def _padded(targets, lengths):
    """The targets as (batch, longest)."""
    if targets.dim() == 2:
        return targets
    *starts, total = accumulate(lengths, initial=0)
    if targets.numel() != total:
        raise RuntimeError(
            f"Expected targets of {total} elements, the sum of target_lengths, got {targets.numel()}"
        )
    shape = len(lengths), max(lengths, default=0)
    if total == 0:
        return targets.new_zeros(shape)
    places = torch.arange(shape[1], device=targets.device) + _on_device(starts, targets).unsqueeze(1)
    return targets.index_select(0, places.clamp_max(total - 1).flatten()).view(shape)


def _check(name, lengths, batch, limit):
    if len(lengths) != batch:
        raise RuntimeError(f"{name} must be of size batch_size")
    if wrong := [length for length in lengths if not 0 <= length <= limit]:
        raise RuntimeError(
            f"Expected {name} to have value from 0 to {limit}, but got value {wrong[0]} "
            "(while checking arguments for ctc_loss)"
        )


def ctc_loss(log_probs, targets, input_lengths, target_lengths, blank=0, zero_infinity=False):
    num_steps, batch, _ = log_probs.shape
    _check("input_lengths", input_lengths, batch, num_steps)
    _check("target_lengths", target_lengths, batch, targets.shape[-1])
    lengths = _on_device(input_lengths, log_probs), _on_device(target_lengths, log_probs)
    padded = _padded(targets, target_lengths)
    loss, log_alpha = _aten._ctc_loss.Tensor(log_probs, padded, *lengths, blank, zero_infinity)
    return loss, log_alpha.narrow(2, 0, 2 * max(target_lengths, default=0) + 1)


def ctc_loss_backward(
    grad, log_probs, targets, input_lengths, target_lengths, loss, log_alpha, blank, zero_infinity=False
):
    padded = _padded(targets, target_lengths)
    lengths = _on_device(input_lengths, log_probs), _on_device(target_lengths, log_probs)
    log_alpha = F.pad(log_alpha, (0, 2 * padded.shape[1] + 1 - log_alpha.shape[2]))
    arguments = grad, log_probs, padded, *lengths, loss, log_alpha, blank, zero_infinity
    return _aten._ctc_loss_backward.Tensor(*arguments)


KERNELS = {"_ctc_loss": ctc_loss, "_ctc_loss_backward": ctc_loss_backward}
