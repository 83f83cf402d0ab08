"""Fused optimizer steps: one operation for all parameters. Formulas: PyTorch's
ATen/native/cpu/Fused*Kernel.cpp.

Hyperparameters are runtime values, so that a schedule (also OneCycleLR's, which moves beta1) never
recompiles. They arrive as float64, and 1 - beta is taken there: in float32 it would cost half of the digits
of 1 - 0.999.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from tpu_backend.lowering.registry import lowering, opmath

_ADAM_RUNTIME = ("lr", "beta1", "beta2", "weight_decay", "eps")
_ADAGRAD_RUNTIME = ("lr", "lr_decay", "weight_decay", "eps")
_SGD_RUNTIME = ("lr", "weight_decay", "dampening")


def _unscaled(grad, grad_scale):
    """What GradScaler asks of a fused optimizer: undo the loss scale, in the stored gradient too."""
    return grad if grad_scale is None else grad / grad_scale.astype(grad.dtype)


def _unless(found_inf, old, new):
    """The new values, or the old ones where GradScaler found a gradient that is not finite."""
    return (
        new if found_inf is None else [jnp.where(found_inf == 1, o, n) for o, n in zip(old, new, strict=True)]
    )


def _complement(beta: Any, dtype: Any) -> jax.Array:
    return (1 - jnp.asarray(beta)).astype(dtype)


def _bias_correction(one_minus_beta, step):
    """1 - beta ** step without cancellation."""
    return -jnp.expm1(step.astype(one_minus_beta.dtype) * jnp.log1p(-one_minus_beta))


def _adam(decoupled):
    def step_all(
        self, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, state_steps,
        *, lr, beta1, beta2, weight_decay, eps, amsgrad, maximize, grad_scale=None, found_inf=None,
    ):  # fmt: skip
        """New (parameters, gradients, exp_avgs, exp_avg_sqs, max_exp_avg_sqs), each a list."""
        columns = []
        for i, (old_param, old_grad, step) in enumerate(zip(self, grads, state_steps, strict=True)):
            dtype = opmath(old_param.dtype)
            rate, decay, epsilon = (jnp.asarray(value).astype(dtype) for value in (lr, weight_decay, eps))
            alpha1, alpha2 = _complement(beta1, dtype), _complement(beta2, dtype)
            param, stored_grad = old_param.astype(dtype), _unscaled(old_grad.astype(dtype), grad_scale)
            grad = -stored_grad if maximize else stored_grad
            if decoupled:
                param = param - rate * decay * param
            else:
                grad = grad + decay * param
            average, square = exp_avgs[i].astype(dtype), exp_avg_sqs[i].astype(dtype)
            average = average + alpha1 * (grad - average)
            square = square + alpha2 * (grad * grad - square)
            largest = jnp.maximum(max_exp_avg_sqs[i].astype(dtype), square) if amsgrad else square
            denominator = jnp.sqrt(largest) / jnp.sqrt(_bias_correction(alpha2, step)) + epsilon
            param = param - rate / _bias_correction(alpha1, step) * average / denominator
            old = [old_param, old_grad, exp_avgs[i], exp_avg_sqs[i]] + (
                [max_exp_avg_sqs[i]] if amsgrad else []
            )
            new = [param, stored_grad, average, square] + ([largest] if amsgrad else [])
            columns.append(_unless(found_inf, old, new))
        lists = [list(column) for column in zip(*columns, strict=True)]
        return lists if amsgrad else [*lists, list(max_exp_avg_sqs)]

    return step_all


lowering("_fused_adam", "_fused_adam.tensor_lr", runtime=_ADAM_RUNTIME)(_adam(decoupled=False))
lowering("_fused_adamw", "_fused_adamw.tensor_lr", runtime=_ADAM_RUNTIME)(_adam(decoupled=True))


@lowering("_fused_sgd", "_fused_sgd.tensor_lr", runtime=_SGD_RUNTIME)
def fused_sgd(
    self, grads, momentum_buffer_list,
    *, weight_decay, momentum, lr, dampening, nesterov, maximize, is_first_step,
    grad_scale=None, found_inf=None,
):  # fmt: skip
    """New (parameters, gradients, momentum buffers), each a list."""
    columns = []
    for i, (old_param, old_grad) in enumerate(zip(self, grads, strict=True)):
        dtype = opmath(old_param.dtype)
        rate, decay = (jnp.asarray(value).astype(dtype) for value in (lr, weight_decay))
        param, stored_grad = old_param.astype(dtype), _unscaled(old_grad.astype(dtype), grad_scale)
        direction = (-stored_grad if maximize else stored_grad) + decay * param
        old, new = [old_param, old_grad], []
        if momentum != 0:
            buffer = direction
            if not is_first_step:
                fresh = _complement(dampening, dtype) * direction
                buffer = momentum * momentum_buffer_list[i].astype(dtype) + fresh
            direction = direction + momentum * buffer if nesterov else buffer
            old, new = [*old, momentum_buffer_list[i]], [buffer]
        columns.append(_unless(found_inf, old, [param - rate * direction, stored_grad, *new]))
    lists = [list(column) for column in zip(*columns, strict=True)]
    return lists if momentum != 0 else [*lists, list(momentum_buffer_list)]


def _adagrad(
    self, grads, state_sums, state_steps,
    *, lr, lr_decay, weight_decay, eps, maximize, grad_scale=None, found_inf=None,
):  # fmt: skip
    """New (parameters, gradients, state sums), each a list."""
    columns = []
    for old_param, old_grad, old_sum, step in zip(self, grads, state_sums, state_steps, strict=True):
        dtype = opmath(old_param.dtype)
        param, stored_grad = old_param.astype(dtype), _unscaled(old_grad.astype(dtype), grad_scale)
        grad = (-stored_grad if maximize else stored_grad) + jnp.asarray(weight_decay).astype(dtype) * param
        squares = old_sum.astype(dtype) + grad * grad
        rate = jnp.asarray(lr).astype(dtype) / (1 + (step - 1) * lr_decay).astype(dtype)
        param = param - rate * grad / (jnp.sqrt(squares) + jnp.asarray(eps).astype(dtype))
        columns.append(_unless(found_inf, [old_param, old_grad, old_sum], [param, stored_grad, squares]))
    return [list(column) for column in zip(*columns, strict=True)]


@lowering("_fused_adagrad", runtime=_ADAGRAD_RUNTIME)
def fused_adagrad(self, grads, state_sums, state_steps, **options):
    """The steps come back as they are: whoever calls has counted them."""
    return [*_adagrad(self, grads, state_sums, state_steps, **options), list(state_steps)]


lowering("_fused_adagrad.tensor_lr", runtime=_ADAGRAD_RUNTIME)(_adagrad)


# ---- gradient scaling


@lowering("_amp_foreach_non_finite_check_and_unscale")
def unscale(self, found_inf, inv_scale):
    """New (gradients, found_inf): found_inf becomes 1 if any gradient is not finite."""
    finite = [jnp.all(jnp.isfinite(grad)) for grad in self]
    grads = [(grad.astype(opmath(grad.dtype)) * inv_scale).astype(grad.dtype) for grad in self]
    return grads, jnp.where(jnp.all(jnp.stack(finite)), found_inf, 1)


@lowering("_amp_update_scale")
def update_scale(self, growth_tracker, found_inf, scale_growth_factor, scale_backoff_factor, growth_interval):
    """New (scale, growth_tracker)."""
    successes = growth_tracker + 1
    grown = self * scale_growth_factor
    grows = successes == growth_interval
    scale = jnp.where(grows & jnp.isfinite(grown), grown, self)
    overflowed = found_inf != 0
    return (
        jnp.where(overflowed, self * scale_backoff_factor, scale),
        jnp.where(overflowed | grows, 0, successes),
    )
