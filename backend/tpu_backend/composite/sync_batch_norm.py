"""The kernels under `nn.SyncBatchNorm`: batch norm over the batches of many ranks.

`torch.nn.modules._functions.SyncBatchNorm` calls them, and the collectives in between. An input is
(N, C, ...). Statistics are (C,), and float32 for 16-bit inputs, as those of PyTorch's CUDA kernels
(`aten/src/ATen/native/cuda/Normalization.cuh`).
"""

import torch

_ACCUMULATED = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


def _accumulated(x):
    return x.to(_ACCUMULATED.get(x.dtype, x.dtype))


def _all_but_channels(x):
    return [dim for dim in range(x.dim()) if dim != 1]


def _per_channel(values, x):
    return None if values is None else values.view(1, -1, *[1] * (x.dim() - 2))


def batch_norm_stats(input, eps):
    """Mean and reciprocal deviation of each channel."""
    variance, mean = torch.var_mean(_accumulated(input), _all_but_channels(input), correction=0)
    return mean, (variance + eps).rsqrt()


def batch_norm_gather_stats_with_counts(
    input, mean, invstd, running_mean, running_var, momentum, eps, counts
):
    """Those of all ranks' elements, from each rank's (ranks, C) and number of elements a channel (ranks,).

    Updates the running statistics. The sum of squares about the common mean is that of each rank about its
    own, and what the rank's mean is off.
    """
    counts = counts.to(mean.dtype)[:, None]
    total = counts.sum()
    common = (mean * counts).sum(0) / total
    squares = ((invstd.square().reciprocal() - eps + (mean - common).square()) * counts).sum(0)
    if running_mean is not None:
        running_mean.lerp_(common.to(running_mean.dtype), momentum)
    if running_var is not None:
        running_var.lerp_((squares / (total - 1)).to(running_var.dtype), momentum)
    return common, (squares / total + eps).rsqrt()


def batch_norm_gather_stats(input, mean, invstd, running_mean, running_var, momentum, eps, count):
    """The same, of ranks that have equally many elements."""
    counts = torch.full((mean.shape[0],), count, dtype=mean.dtype, device=mean.device)
    return batch_norm_gather_stats_with_counts(
        input, mean, invstd, running_mean, running_var, momentum, eps, counts
    )


def batch_norm_elemt(input, weight, bias, mean, invstd, eps):
    """The normalised input."""
    scale = invstd if weight is None else invstd * weight
    result = (_accumulated(input) - _per_channel(mean, input)) * _per_channel(scale, input)
    if bias is not None:
        result = result + _per_channel(bias, input)
    return result.to(input.dtype)


def batch_norm_backward_reduce(grad_out, input, mean, invstd, weight, input_g, weight_g, bias_g):
    """Of each channel the sums of the gradient and of the gradient times (input - mean), of this rank; the
    gradients of weight and bias."""
    grad, dims = _accumulated(grad_out), _all_but_channels(input)
    sum_dy = grad.sum(dims)
    sum_dy_xmu = (grad * (_accumulated(input) - _per_channel(mean, input))).sum(dims)
    kept = sum_dy.dtype if weight is None else weight.dtype
    return (
        sum_dy if input_g else None,
        sum_dy_xmu if input_g else None,
        (sum_dy_xmu * invstd).to(kept) if weight_g else None,
        sum_dy.to(kept) if bias_g else None,
    )


def batch_norm_backward_elemt(grad_out, input, mean, invstd, weight, sum_dy, sum_dy_xmu, count):
    """The gradient of the input, from the sums over all ranks; `count` (ranks,) elements a channel."""
    total = count.sum()
    slope = sum_dy_xmu / total * invstd.square()
    scale = invstd if weight is None else invstd * weight
    centred = _accumulated(input) - _per_channel(mean, input)
    grad = _accumulated(grad_out) - _per_channel(sum_dy / total, input) - centred * _per_channel(slope, input)
    return (grad * _per_channel(scale, input)).to(input.dtype)


_FUNCTIONS = (
    batch_norm_stats,
    batch_norm_gather_stats_with_counts,
    batch_norm_gather_stats,
    batch_norm_elemt,
    batch_norm_backward_reduce,
    batch_norm_backward_elemt,
)
KERNELS = {function.__name__: function for function in _FUNCTIONS}
