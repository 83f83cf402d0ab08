"""Loss functions and their derivatives. ``reduction`` is PyTorch's enum: 0 none, 1 mean, 2 sum."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from tpu_backend.lowering.bounds import require_all, require_in_range
from tpu_backend.lowering.dims import at_least_1d
from tpu_backend.lowering.registry import NotLoweredError, converted, is_16_bit, lowering, opmath, stored

_NONE, _MEAN, _SUM = 0, 1, 2


def _reduced(losses, reduction):
    if reduction == _MEAN:
        return jnp.mean(losses)
    return jnp.sum(losses) if reduction == _SUM else losses


def _per_element(grad_output, losses, reduction):
    """The gradient that reaches each element's loss."""
    return grad_output / losses.size if reduction == _MEAN else grad_output


# ---- negative log likelihood; classes are dim 1 (dim 0 of a single sample)


def _class_axis(self):
    return 0 if self.ndim == 1 else 1


def _target_weights(self, target, weight, ignore_index):
    """The weight of every target, 0 where it is ignored, and a class number that is safe to look up."""
    valid = target != ignore_index
    safe = jnp.where(valid, target, 0).astype(jnp.int32)
    if weight is None:
        return converted(valid, self.dtype), safe
    return jnp.where(
        valid, weight.at[safe].get(mode="promise_in_bounds", wrap_negative_indices=False), 0
    ), safe


def _nll_loss(self, target, weight, reduction, ignore_index, picked_from):
    if target.dtype not in (jnp.int64, jnp.uint8):
        raise NotLoweredError("classes of another dtype: PyTorch refuses them, in its own words on the CPU")
    axis = _class_axis(self)
    if self.ndim == 1:
        target = target.reshape(())  # PyTorch takes one class of shape (1,), too
    require_in_range(
        target, 0, self.shape[axis], IndexError, "Target {index} is out of bounds.", allowed=ignore_index
    )
    weights, safe = _target_weights(self, target, weight, ignore_index)
    losses = jnp.where(weights == 0, 0, -picked_from(self, safe, axis) * weights)
    if reduction == _NONE:
        return losses, jnp.zeros((), self.dtype)
    total = jnp.sum(weights)
    return (jnp.sum(losses) / total if reduction == _MEAN else jnp.sum(losses)), total


def _gathered(self, classes, axis):
    """Of each target its element."""
    places = jnp.expand_dims(classes.astype(jnp.uint32), axis)  # unsigned: no wrapping of negative indices
    return jnp.take_along_axis(self, places, axis, mode="promise_in_bounds").squeeze(axis)


def _selected(self, classes, axis):
    """The same as a sum. A gather reads from memory: for it XLA writes a log-softmax down, in float32. A sum
    is computed together with what it adds.
    """
    places = lax.broadcasted_iota(jnp.int32, self.shape, axis)
    return jnp.sum(jnp.where(places == jnp.expand_dims(classes, axis), self, 0), axis)


@lowering(
    "nll_loss_forward",
    "nll_loss2d_forward",
    promote="opmath",
    one_dtype=("self", "weight"),
    on={"tpu": functools.partial(_nll_loss, picked_from=_selected)},
)
def nll_loss_forward(self, target, weight, reduction, ignore_index):
    return _nll_loss(self, target, weight, reduction, ignore_index, _gathered)


@lowering("nll_loss_backward", "nll_loss2d_backward", promote="opmath")
def nll_loss_backward(grad_output, self, target, weight, reduction, ignore_index, total_weight):
    axis = _class_axis(self)
    weights, safe = _target_weights(self, target, weight, ignore_index)
    grad = -grad_output * weights
    if reduction == _MEAN:
        # Where all are ignored the mean is 0 / 0, and still no gradient reaches what is ignored.
        grad = jnp.where(target == ignore_index, 0, grad / total_weight)
    classes = lax.broadcasted_iota(jnp.int32, self.shape, axis)
    return jnp.where(classes == jnp.expand_dims(safe, axis), jnp.expand_dims(grad, axis), 0)


def _rounded_to(spec):
    """Rounds to what the output's dtype holds: PyTorch makes such a loss of several 16-bit steps."""
    return functools.partial(stored, dtype=spec.dtype)


def _scaled_grad(grad_output, slopes, factor, reduction, rounded):
    """The gradient through elements whose losses have ``factor * slopes`` for derivatives."""
    if reduction == _MEAN:
        factor = rounded(jnp.asarray(factor / slopes.size, slopes.dtype))
    return rounded(factor * slopes) * grad_output


# ---- distances


@lowering("mse_loss", promote="result")
def mse_loss(self, target, reduction=_MEAN, *, out):
    rounded = _rounded_to(out[0])
    return _reduced(rounded(jnp.square(rounded(self - target))), reduction)


@lowering("mse_loss_backward", promote="result")
def mse_loss_backward(grad_output, self, target, reduction, *, out):
    if is_16_bit(out[0].dtype):
        rounded = _rounded_to(out[0])
        return _scaled_grad(grad_output, rounded(self - target), 2, reduction, rounded)
    difference = self - target
    return 2 * difference * _per_element(grad_output, difference, reduction)


@lowering("smooth_l1_loss", promote="result")
def smooth_l1_loss(self, target, reduction=_MEAN, beta=1.0, *, out):
    # PyTorch's CPU kernel works in float16 step by step, but in bfloat16 in float32.
    rounded = _rounded_to(out[0]) if out[0].dtype == jnp.float16 else lambda value: value
    distance = rounded(jnp.abs(self - target))
    if beta == 0:
        return _reduced(distance, reduction)
    beta, half = rounded(jnp.asarray(beta, self.dtype)), rounded(jnp.asarray(0.5 * beta, self.dtype))
    squares = rounded(rounded(0.5 * distance) * distance)
    losses = jnp.where(distance < beta, squares / beta, distance - half)
    return _reduced(stored(losses, out[0].dtype), reduction)


@lowering("smooth_l1_loss_backward", promote="result")
def smooth_l1_loss_backward(grad_output, self, target, reduction, beta):
    difference = self - target
    grad = _per_element(grad_output, difference, reduction)
    if beta == 0:
        return jnp.sign(difference) * grad
    return jnp.where(jnp.abs(difference) < beta, difference / beta, jnp.sign(difference)) * grad


@lowering("huber_loss", runtime=("delta",))
def huber_loss(self, target, reduction=_MEAN, delta=1.0, *, out):
    # In the dtype of both, though the result is of the first one's. PyTorch's CPU kernel computes float16 in
    # float32, and bfloat16 in steps that are rounded.
    if jnp.result_type(self, target) == jnp.float16:
        self, target = self.astype(jnp.float32), target.astype(jnp.float32)
    distance = jnp.abs(self - target)
    delta = jnp.asarray(delta, distance.dtype)
    losses = jnp.where(distance <= delta, 0.5 * distance * distance, delta * (distance - 0.5 * delta))
    return _reduced(stored(losses, out[0].dtype), reduction)


@lowering("huber_loss_backward", promote="result", runtime=("delta",))
def huber_loss_backward(grad_output, self, target, reduction, delta, *, out):
    if is_16_bit(out[0].dtype):
        rounded = _rounded_to(out[0])
        difference = rounded(self - target)
        share = rounded(jnp.asarray(1 / difference.size if reduction == _MEAN else 1, self.dtype))
        beyond = rounded(share * grad_output) * jnp.sign(difference) * delta
        return jnp.where(jnp.abs(difference) < delta, rounded(share * difference) * grad_output, beyond)
    difference = self - target
    return jnp.clip(difference, -delta, delta) * _per_element(grad_output, difference, reduction)


# ---- probabilities


@lowering("binary_cross_entropy", promote="result", one_dtype=("self", "target"))
def binary_cross_entropy(self, target, weight=None, reduction=_MEAN):
    for name, values in (("input", self), ("target", target)):
        within = (values >= 0) & (values <= 1)
        require_all(within, RuntimeError, f"all elements of {name} should be between 0 and 1")
    # PyTorch clamps the logarithms at -100, so that a loss is never infinite.
    losses = -(target * jnp.maximum(jnp.log(self), -100) + (1 - target) * jnp.maximum(jnp.log1p(-self), -100))
    return _reduced(losses if weight is None else losses * weight, reduction)


@lowering("binary_cross_entropy_backward", promote="result")
def binary_cross_entropy_backward(grad_output, self, target, weight=None, reduction=_MEAN, *, out):
    if is_16_bit(out[0].dtype):
        rounded = _rounded_to(out[0])
        scale = jnp.maximum(rounded(rounded(1 - self) * self), rounded(jnp.asarray(1e-12, self.dtype)))
        grad = rounded(rounded(grad_output * rounded(self - target)) / scale)
        return _per_element(grad if weight is None else rounded(grad * weight), self, reduction)
    grad = (
        _per_element(grad_output, self, reduction) * (self - target) / jnp.maximum((1 - self) * self, 1e-12)
    )
    return grad if weight is None else grad * weight


@lowering("binary_cross_entropy_with_logits")
def binary_cross_entropy_with_logits(self, target, weight=None, pos_weight=None, reduction=_MEAN):
    """In the steps and dtypes of PyTorch's: the sigmoid in that of the logits, the losses in the target's."""

    def in_dtype_of(tensor, value):
        return stored(value.astype(opmath(tensor.dtype)), tensor.dtype)

    logits, ones = self.astype(opmath(self.dtype)), target.astype(opmath(target.dtype))
    of_ones = in_dtype_of(self, jax.nn.log_sigmoid(logits))
    if pos_weight is not None:
        common = jnp.zeros((), jnp.promote_types(pos_weight.dtype, target.dtype))
        more = in_dtype_of(pos_weight, pos_weight.astype(opmath(pos_weight.dtype)) - 1)
        factors = in_dtype_of(common, in_dtype_of(common, more * ones) + 1)
        of_ones = in_dtype_of(self, factors * of_ones)
    losses = in_dtype_of(target, in_dtype_of(target, 1 - ones) * logits)
    losses = in_dtype_of(target, losses - of_ones)
    if weight is not None:
        losses = in_dtype_of(target, losses * weight.astype(opmath(weight.dtype)))
    return _reduced(losses, reduction)


@lowering("soft_margin_loss", promote="result")
def soft_margin_loss(self, target, reduction=_MEAN, *, out):
    rounded = _rounded_to(out[0])
    return _reduced(rounded(jnp.log1p(rounded(jnp.exp(rounded(-target * self))))), reduction)


@lowering("soft_margin_loss_backward", promote="result")
def soft_margin_loss_backward(grad_output, self, target, reduction, *, out):
    if is_16_bit(out[0].dtype):
        rounded = _rounded_to(out[0])
        exponential = rounded(jnp.exp(rounded(-target * self)))
        share = rounded(jnp.asarray(_per_element(-1, self, reduction), self.dtype))
        slopes = rounded(rounded(target * exponential) * share)
        return rounded(slopes / rounded(exponential + 1)) * grad_output
    return -target * jax.nn.sigmoid(-target * self) * _per_element(grad_output, self, reduction)


# ---- margins between classes


def _multi_margin(self, target, p, margin, weight, reduction):
    scores, target = jnp.atleast_2d(self), jnp.atleast_1d(target)
    is_target = lax.broadcasted_iota(target.dtype, scores.shape, 1) == target[:, None]
    of_target = jnp.sum(jnp.where(is_target, scores, 0), 1, keepdims=True)
    hinge = jnp.maximum(margin - of_target + scores, 0) ** p
    hinge = hinge if weight is None else hinge * weight[target][:, None]
    losses = jnp.sum(jnp.where(is_target, 0, hinge), 1) / scores.shape[1]
    return _reduced(losses if self.ndim == 2 else losses[0], reduction)


@lowering("multi_margin_loss", promote="opmath", static=("p", "margin"), one_dtype=("self", "weight"))
def multi_margin_loss(self, target, p=1, margin=1, weight=None, reduction=_MEAN):
    require_in_range(target, 0, at_least_1d(self).shape[-1], RuntimeError, "target out of range")
    return _multi_margin(self, target, p, margin, weight, reduction)


@lowering("multi_margin_loss_backward", promote="opmath", static=("p", "margin"))
def multi_margin_loss_backward(grad_output, self, target, p, margin, weight=None, reduction=_MEAN):
    return jax.vjp(lambda scores: _multi_margin(scores, target, p, margin, weight, reduction), self)[1](
        grad_output
    )[0]


@lowering("multilabel_margin_loss_forward", promote="opmath")
def multilabel_margin_loss_forward(self, target, reduction):
    """Targets are class numbers, ended by the first -1."""
    require_in_range(
        target, -1, at_least_1d(self).shape[-1], RuntimeError, "argument #2 'target' is out of range"
    )
    is_target = _label_mask(at_least_1d(self), at_least_1d(target)).reshape(target.shape)
    return _multilabel_margin(self, target, reduction), is_target


def _label_mask(self, target):
    listed = _listed(target)
    classes = jnp.arange(self.shape[-1], dtype=target.dtype)
    return jnp.any((target[..., :, None] == classes) & listed[..., :, None], -2).astype(self.dtype)


def _listed(target):
    return jnp.cumsum(target < 0, -1) == 0


def _multilabel_margin(self, target, reduction):
    scores, labels = jnp.atleast_2d(self), jnp.atleast_2d(target)
    other = _label_mask(scores, labels) == 0
    of_labels = jnp.take_along_axis(scores, jnp.maximum(labels, 0), -1)
    hinge = jnp.maximum(1 - of_labels[:, :, None] + scores[:, None, :], 0)
    counted = _listed(labels)[:, :, None] & other[:, None, :]
    losses = jnp.sum(jnp.where(counted, hinge, 0), (1, 2)) / scores.shape[1]
    return _reduced(losses if self.ndim == 2 else losses[0], reduction)


@lowering("multilabel_margin_loss_backward", promote="opmath")
def multilabel_margin_loss_backward(grad_output, self, target, reduction, is_target):
    return jax.vjp(lambda scores: _multilabel_margin(scores, target, reduction), self)[1](grad_output)[0]
