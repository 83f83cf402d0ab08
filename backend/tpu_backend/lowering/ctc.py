"""Connectionist temporal classification: the loss of a sequence whose alignment to its labels is unknown.

After Graves et al. (2006). ``log_probs`` is (T, B, C), ``targets`` (B, S), lengths are (B,). The labels of a
sample with blanks around them make L = 2S + 1 states; alpha and beta (T, B, L) are the log probabilities of
all alignments up to, and from, a time and state (PyTorch keeps alpha as (B, T, L)). Lists of lengths come
here as tensors (composite/ctc.py).
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from tpu_backend.lowering import rounding
from tpu_backend.lowering.registry import lowering

_NEVER = -jnp.inf


def _log_sum(*terms):
    stacked = jnp.stack(terms)
    largest = jnp.max(stacked, 0)
    largest = jnp.where(jnp.isfinite(largest), largest, 0)
    return rounding.log(jnp.sum(rounding.exp(stacked - largest), 0)) + largest


def _states(targets, target_lengths, blank):
    """The label of every state, which states a sample has, and which may be entered from two before."""
    batch, longest = targets.shape
    labels = jnp.full((batch, 2 * longest + 1), blank, targets.dtype).at[:, 1::2].set(targets)
    exists = jnp.arange(2 * longest + 1) < 2 * target_lengths[:, None] + 1
    labels = jnp.where(exists, labels, blank)
    two_before = jnp.pad(labels, ((0, 0), (2, 0)), constant_values=blank)[:, : labels.shape[1]]
    return labels, exists, labels != two_before


def _emitted(log_probs, labels):
    places = jnp.broadcast_to(labels, (log_probs.shape[0], *labels.shape))
    return jnp.take_along_axis(log_probs, places, 2, mode="clip")


def _shifted(values, by):
    """values[..., s - by], never where that is no state."""
    width = values.shape[-1]
    if by > 0:
        return jnp.pad(values, ((0, 0), (by, 0)), constant_values=_NEVER)[:, :width]
    return jnp.pad(values, ((0, 0), (0, -by)), constant_values=_NEVER)[:, -by:]


def _alpha(emitted, exists, skips):
    starts = jnp.arange(emitted.shape[2]) < 2

    def step(before, now):
        skipped = jnp.where(skips, _shifted(before, 2), _NEVER)
        value = jnp.where(exists, _log_sum(before, _shifted(before, 1), skipped) + now, _NEVER)
        return value, value

    first = jnp.where(starts & exists, emitted[0], _NEVER)
    return jnp.concatenate([first[None], lax.scan(step, first, emitted[1:])[1]])


def _beta(emitted, exists, skips, input_lengths, target_lengths):
    ends = jnp.arange(emitted.shape[2]) >= 2 * target_lengths[:, None] - 1
    skips_from = jnp.pad(skips, ((0, 0), (0, 2)))[:, 2:]

    def step(after, now):
        time, emission = now
        skipped = jnp.where(skips_from, _shifted(after, -2), _NEVER)
        value = jnp.where(exists, _log_sum(after, _shifted(after, -1), skipped) + emission, _NEVER)
        last = jnp.where(ends & exists, emission, _NEVER)
        value = jnp.where((time == input_lengths - 1)[:, None], last, value)
        return value, value

    start = jnp.full(emitted.shape[1:], _NEVER, emitted.dtype)
    return lax.scan(step, start, (jnp.arange(len(emitted)), emitted), reverse=True)[1]


def _by_label(alpha_beta, labels, num_labels):
    """alpha + beta (T, B, L) of the states of each label together: (T, B, C).

    One state after another, from the last: the sums are of log probabilities far from zero, whose rounding
    shows in the gradient, so the order is PyTorch's.
    """
    steps, batch, _ = alpha_beta.shape

    def step(collected, state):
        label, value = state
        place = jnp.arange(batch), label
        return collected.at[place].set(_log_sum(collected[place], value), mode="drop"), None

    nothing = jnp.full((batch, num_labels, steps), _NEVER, alpha_beta.dtype)
    collected = lax.scan(step, nothing, (labels.T, alpha_beta.transpose(2, 1, 0)), reverse=True)[0]
    return collected.transpose(2, 0, 1)


def _is_running(log_probs, input_lengths):
    return (jnp.arange(log_probs.shape[0])[:, None] < input_lengths)[:, :, None]


@lowering("_ctc_loss.Tensor", promote="opmath")
def ctc_loss(log_probs, targets, input_lengths, target_lengths, blank=0, zero_infinity=False):
    """(negative log likelihood (B,), alpha); PyTorch zeroes infinite losses outside."""
    steps = log_probs.shape[0]
    labels, exists, skips = _states(targets, target_lengths, blank)
    alpha = _alpha(_emitted(log_probs, labels), exists, skips)
    last = jnp.take_along_axis(alpha, jnp.clip(input_lengths - 1, 0, steps - 1)[None, :, None], 0)[0]
    in_blank = jnp.take_along_axis(last, 2 * target_lengths[:, None], 1)[:, 0]
    in_label = jnp.take_along_axis(last, jnp.maximum(2 * target_lengths[:, None] - 1, 0), 1)[:, 0]
    loss = -_log_sum(in_blank, jnp.where(target_lengths > 0, in_label, _NEVER))
    loss = jnp.where(input_lengths > 0, loss, jnp.where(target_lengths == 0, 0, jnp.inf))
    alpha = jnp.where(_is_running(log_probs, input_lengths), alpha, _NEVER)
    return loss, jnp.swapaxes(alpha, 0, 1)


@lowering("_ctc_loss_backward.Tensor", promote="opmath")
def ctc_loss_backward(
    grad,
    log_probs,
    targets,
    input_lengths,
    target_lengths,
    neg_log_likelihood,
    log_alpha,
    blank,
    zero_infinity=False,
):
    """With respect to logits: PyTorch takes it for granted that ``log_probs`` are normalised."""
    labels, exists, skips = _states(targets, target_lengths, blank)
    beta = _beta(_emitted(log_probs, labels), exists, skips, input_lengths, target_lengths)
    through = _by_label(jnp.swapaxes(log_alpha, 0, 1) + beta, labels, log_probs.shape[2])
    impossible = jnp.isinf(neg_log_likelihood)
    reached = jnp.isfinite(through) & jnp.isfinite(log_probs)
    exponent = jnp.where(reached, through + neg_log_likelihood[:, None] - log_probs, _NEVER)
    result = (rounding.exp(log_probs) - rounding.exp(exponent)) * grad[:, None]
    result = jnp.where(impossible[:, None], 0 if zero_infinity else jnp.nan, result)
    return jnp.where(_is_running(log_probs, input_lengths), result, 0)
