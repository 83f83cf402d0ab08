"""Softmax and the normalisations over layers, groups, batches and root mean squares, each with its
derivative.

Statistics are computed in float32 for 16-bit inputs, in two passes.  Formulas: PyTorch's ATen/native
(layer_norm_kernel.cpp, group_norm_kernel.cpp, Normalization.cpp).
"""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from tpu_backend.lowering.dims import at_least_1d, wrap_dim
from tpu_backend.lowering.registry import NotLoweredError, lowering, stored

# ---- softmax


def _expect_floats(self):
    if not jnp.issubdtype(self.dtype, jnp.inexact):
        raise NotLoweredError("softmax of integers: PyTorch refuses it, in its own words on the CPU")


def _shifted(self, axis):
    largest = jnp.max(self, axis, keepdims=True)
    return self - jnp.where(jnp.isfinite(largest), largest, 0)


@lowering("_softmax", promote="opmath")
def softmax(self, dim, half_to_float):
    _expect_floats(self)
    if self.ndim == 0:
        return jnp.exp(self - self)
    if self.size == 0:
        return self
    exponentials = jnp.exp(self - jnp.max(self, dim, keepdims=True))
    return exponentials / jnp.sum(exponentials, dim, keepdims=True)


@lowering("_safe_softmax", promote="opmath")
def safe_softmax(self, dim, dtype=None):
    """Rows that are -inf throughout give zeros."""
    if self.ndim == 0 or self.size == 0:
        return jnp.where(self == -jnp.inf, 0, jnp.ones_like(self))
    exponentials = jnp.exp(_shifted(self, dim))
    total = jnp.sum(exponentials, dim, keepdims=True)
    return jnp.where(total == 0, 0, exponentials / jnp.where(total == 0, 1, total))


@lowering("_log_softmax", promote="opmath")
def log_softmax(self, dim, half_to_float, *, out):
    _expect_floats(self)
    if self.ndim == 0:
        return self - self
    if self.size == 0:
        return self
    shifted = self - jnp.max(self, dim, keepdims=True)
    total = jnp.sum(jnp.exp(shifted), dim, keepdims=True)
    if dim in (-1, self.ndim - 1):  # along the last dim, PyTorch's CPU keeps what it subtracts in 16 bit
        return shifted - stored(jnp.log(stored(total, out[0].dtype)), out[0].dtype)
    return shifted - jnp.log(total)


@lowering("_softmax_backward_data", promote="opmath", one_dtype=("grad_output", "output"))
def softmax_backward(grad_output, output, dim, input_dtype):
    """As a product: where one output is close to 1, its gradient less the mean is exact."""
    grad, weights = at_least_1d(grad_output), at_least_1d(output)
    mean = jnp.sum(grad * weights, dim, keepdims=True)
    return (weights * (grad - mean)).reshape(output.shape)


@lowering("_log_softmax_backward_data", promote="opmath", one_dtype=("grad_output", "output"))
def log_softmax_backward(grad_output, output, dim, input_dtype):
    total = jnp.sum(at_least_1d(grad_output), dim, keepdims=True)
    return grad_output - jnp.exp(output) * (total.reshape(()) if output.ndim == 0 else total)


@lowering("_masked_softmax", promote="opmath")
def masked_softmax(self, mask, dim=None, mask_type=None):
    if mask_type == 0:  # (L, L), the same for every batch and head
        mask = mask.reshape((1, 1, *mask.shape))
    elif mask_type == 1:  # (B, L): keys that are padding
        mask = mask.reshape(mask.shape[0], 1, 1, mask.shape[1])
    # NaN where all is masked, as on the CPU.
    return jax.nn.softmax(jnp.where(mask.astype(bool), -jnp.inf, self), -1 if dim is None else dim)


# ---- layer norm


def _trailing(self, normalized_shape):
    return tuple(range(self.ndim - len(normalized_shape), self.ndim))


def _leading(self, normalized_shape):
    return tuple(range(self.ndim - len(normalized_shape)))


# Of one dtype, or the parameters of the one that it is computed in.  Running statistics may be wider than
# both, as on a GPU: a bfloat16 model may keep its buffers in float32.
_PARAMETERS = ("input", "weight", "bias")


def _affine(normalized, weight, bias):
    if weight is not None:
        normalized = normalized * weight
    return normalized if bias is None else normalized + bias


@lowering("native_layer_norm", promote="opmath", one_dtype=_PARAMETERS, or_wider=True)
def layer_norm(input, normalized_shape, weight, bias, eps, *, out):
    dims = _trailing(input, normalized_shape)
    mean = jnp.mean(input, dims, keepdims=True)
    centred = input - mean
    rstd = lax.rsqrt(jnp.mean(centred * centred, dims, keepdims=True) + eps)
    return _affine(centred * rstd, weight, bias), stored(mean, out[1].dtype), stored(rstd, out[2].dtype)


@lowering("native_layer_norm_backward", promote="opmath")
def layer_norm_backward(grad_out, input, normalized_shape, mean, rstd, weight, bias, output_mask):
    dims, batch = _trailing(input, normalized_shape), _leading(input, normalized_shape)
    normalized = (input - mean) * rstd
    grad_normalized = grad_out if weight is None else grad_out * weight
    grad_input = grad_weight = grad_bias = None
    if output_mask[0]:
        grad_mean = jnp.mean(grad_normalized, dims, keepdims=True)
        grad_scale = jnp.mean(grad_normalized * normalized, dims, keepdims=True)
        grad_input = rstd * (grad_normalized - grad_mean - normalized * grad_scale)
    if output_mask[1]:
        grad_weight = _sum_of_rows(grad_out * normalized, batch)
    if output_mask[2]:
        grad_bias = _sum_of_rows(grad_out, batch)
    return grad_input, grad_weight, grad_bias


_FEW_ROWS = 1024  # of more, sums in another order than one after the other are nearer to the truth


def _sum_of_rows(rows, dims):
    """A few rows on the CPU one after the other, as PyTorch's kernel: the order of a matrix product there."""
    num_rows = math.prod(rows.shape[: len(dims)])

    def product(rows):
        ones = jnp.ones(num_rows, rows.dtype)
        sums = jnp.matmul(ones, rows.reshape(num_rows, -1), precision=lax.Precision.HIGHEST)
        return sums.reshape(rows.shape[len(dims) :])

    if rows.dtype != jnp.float32 or not 0 < num_rows <= _FEW_ROWS or rows.size == 0:
        return jnp.sum(rows, dims)
    return lax.platform_dependent(rows, cpu=product, default=lambda rows: jnp.sum(rows, dims))


# ---- group norm


@lowering("native_group_norm", promote="opmath", one_dtype=_PARAMETERS, or_wider=True)
def group_norm(input, weight, bias, N, C, HxW, group, eps):
    grouped = input.reshape(N, group, C // group * HxW)  # no -1: there may be no elements
    mean = jnp.mean(grouped, -1, keepdims=True)
    centred = grouped - mean
    rstd = lax.rsqrt(jnp.mean(centred * centred, -1, keepdims=True) + eps)
    normalized = (centred * rstd).reshape(input.shape)
    weight, bias = (_per_channel(value, input.ndim) for value in (weight, bias))
    return _affine(normalized, weight, bias), mean.reshape(N, group), rstd.reshape(N, group)


@lowering("native_group_norm_backward", promote="opmath")
def group_norm_backward(grad_out, input, mean, rstd, weight, N, C, HxW, group, output_mask):
    mean, rstd = mean.reshape(N, group, 1), rstd.reshape(N, group, 1)
    grouped_shape = (N, group, C // group * HxW)
    normalized = (input.reshape(grouped_shape) - mean) * rstd
    grad_normalized = grad_out if weight is None else grad_out * _per_channel(weight, grad_out.ndim)
    grad_normalized = grad_normalized.reshape(grouped_shape)
    grad_input = grad_weight = grad_bias = None
    if output_mask[0]:
        grad_mean = jnp.mean(grad_normalized, -1, keepdims=True)
        grad_scale = jnp.mean(grad_normalized * normalized, -1, keepdims=True)
        grad_input = (rstd * (grad_normalized - grad_mean - normalized * grad_scale)).reshape(input.shape)
    grad_channels = grad_out.reshape(N, C, HxW)
    if output_mask[1]:
        grad_weight = jnp.sum(grad_channels * normalized.reshape(N, C, HxW), (0, 2))
    if output_mask[2]:
        grad_bias = jnp.sum(grad_channels, (0, 2))
    return grad_input, grad_weight, grad_bias


# ---- batch norm: channels are dim 1


def _per_channel(value, ndim):
    return None if value is None else value.reshape((1, -1) + (1,) * (ndim - 2))


def _channel_dims(input):
    return tuple(axis for axis in range(input.ndim) if axis != 1)


def _batch_statistics(input, kept=jnp.float32):
    """Mean and variance of each channel as PyTorch's CPU has them among parameters of the dtype ``kept``."""
    dims = _channel_dims(input)
    mean = jnp.mean(input, dims)
    # Where a plane is one element the CPU's kernel is another, which centres on what it keeps.
    centre = stored(mean, kept) if input.size == input.shape[0] * input.shape[1] else mean
    squares = jnp.square(input - _per_channel(centre, input.ndim))
    if kept != jnp.bfloat16:  # also in float16, where a sum would soon overflow
        return mean, jnp.mean(squares, dims)
    count = jnp.asarray(input.size // max(input.shape[1], 1), input.dtype)
    return mean, stored(stored(jnp.sum(squares, dims), kept) / stored(count, kept), kept)


def _normalize(input, weight, bias, mean, rstd):
    ndim = input.ndim
    normalized = (input - _per_channel(mean, ndim)) * _per_channel(rstd, ndim)
    return _affine(normalized, _per_channel(weight, ndim), _per_channel(bias, ndim))


_batch_norm = partial(lowering, promote="opmath", runtime=("momentum",), one_dtype=_PARAMETERS, or_wider=True)


@_batch_norm("native_batch_norm")
def batch_norm(input, weight, bias, running_mean, running_var, training, momentum, eps, out=None):
    """Does not update the running statistics: see ``names.HIDDEN_WRITES``."""
    if not training:
        result = _normalize(input, weight, bias, running_mean, lax.rsqrt(running_var + eps))
        return result, jnp.zeros(out[1].shape), jnp.zeros(out[2].shape)
    kept = out[1].dtype  # 16 bit among 16-bit parameters, as on the CPU
    mean, variance = _batch_statistics(input, kept)
    mean, rstd = stored(mean, kept), stored(lax.rsqrt(variance + eps), kept)
    return _normalize(input, weight, bias, mean, rstd), mean, rstd


@_batch_norm("_native_batch_norm_legit.no_stats")
def batch_norm_no_stats(input, weight, bias, training, momentum, eps, out=None):
    return batch_norm(input, weight, bias, None, None, True, momentum, eps, out)


@_batch_norm("_native_batch_norm_legit_no_training")
def batch_norm_no_training(input, weight, bias, running_mean, running_var, momentum, eps, out=None):
    return batch_norm(input, weight, bias, running_mean, running_var, False, momentum, eps, out)


def _updated_statistics(input, running_mean, running_var, momentum):
    mean, variance = _batch_statistics(input)
    count = input.size // input.shape[1]
    unbiased = variance * (count / max(count - 1, 1))
    kept, momentum = (jnp.asarray(share, mean.dtype) for share in (1 - momentum, momentum))
    return kept * running_mean + momentum * mean, kept * running_var + momentum * unbiased


@_batch_norm("_native_batch_norm_legit_functional")
def batch_norm_functional(input, weight, bias, running_mean, running_var, training, momentum, eps, out=None):
    """(output, mean, rstd, new running_mean, new running_var)."""
    results = batch_norm(input, weight, bias, running_mean, running_var, training, momentum, eps, out)
    if training:
        running_mean, running_var = _updated_statistics(input, running_mean, running_var, momentum)
    return *results, running_mean, running_var


@_batch_norm("_batch_norm_with_update_functional")
def batch_norm_with_update(input, weight, bias, running_mean, running_var, momentum, eps, out=None):
    """(output, mean, rstd, reserve, new running_mean, new running_var)."""
    results = batch_norm_functional(input, weight, bias, running_mean, running_var, True, momentum, eps, out)
    return *results[:3], jnp.zeros(out[3].shape), *results[3:]


@_batch_norm("_batch_norm_no_update")
def batch_norm_no_update(input, weight, bias, running_mean, running_var, momentum, eps, out=None):
    results = batch_norm(input, weight, bias, running_mean, running_var, False, momentum, eps, out)
    return *results, jnp.zeros(out[3].shape)


@lowering("native_batch_norm_backward", promote="opmath")
def batch_norm_backward(
    grad_out, input, weight, running_mean, running_var, save_mean, save_invstd, train, eps, output_mask
):
    mean, rstd = (save_mean, save_invstd) if train else (running_mean, lax.rsqrt(running_var + eps))
    dims, ndim = _channel_dims(input), input.ndim
    normalized = (input - _per_channel(mean, ndim)) * _per_channel(rstd, ndim)
    grad_weight, grad_bias = jnp.sum(grad_out * normalized, dims), jnp.sum(grad_out, dims)
    scale = rstd if weight is None else rstd * weight
    grad_input = grad_out
    if train:
        count = input.size // input.shape[1]
        grad_input = (
            grad_out - (_per_channel(grad_bias, ndim) + normalized * _per_channel(grad_weight, ndim)) / count
        )
    grad_input = grad_input * _per_channel(scale, ndim)
    return tuple(
        grad if wanted else None for grad, wanted in zip((grad_input, grad_weight, grad_bias), output_mask)
    )


@lowering("batch_norm_backward", promote="opmath")
def batch_norm_backward_reserve(
    grad_out, input, weight, running_mean, running_var, save_mean, save_var, update, eps, output_mask, reserve
):
    return batch_norm_backward(
        grad_out, input, weight, running_mean, running_var, save_mean, save_var, update, eps, output_mask
    )


# ---- weight norm


def _weight_norm_dims(v, dim):
    return tuple(axis for axis in range(v.ndim) if axis != wrap_dim(dim, v.ndim))


@lowering("_weight_norm_interface", promote="opmath")
def weight_norm(v, g, dim=0):
    norms = jnp.sqrt(jnp.sum(v * v, _weight_norm_dims(v, dim), keepdims=True))
    return v * (g / norms), norms


@lowering("_weight_norm_interface_backward", promote="opmath")
def weight_norm_backward(grad_w, saved_v, saved_g, saved_norms, dim):
    along = jnp.sum(grad_w * saved_v, _weight_norm_dims(saved_v, dim), keepdims=True)
    grad_v = saved_g / saved_norms * (grad_w - saved_v * along / jnp.square(saved_norms))
    return grad_v, along / saved_norms
