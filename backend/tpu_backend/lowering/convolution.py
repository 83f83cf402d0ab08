"""Convolutions of any rank, plain and transposed, and their derivatives.

Layout is PyTorch's: input (N, C, ...), weight (out, in / groups, ...), or (in, out / groups, ...) when
transposed. Derivatives are JAX's own transposes of the forward convolution.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from tpu_backend.lowering.matmul import NO_INT64_PRODUCTS, product_precision
from tpu_backend.lowering.registry import NotLoweredError, lowering, opmath


def _each_dim(values: Sequence[int], rank: int) -> tuple[int, ...]:
    """One entry a spatial dim; PyTorch allows a single one for all."""
    return tuple(values) if len(values) == rank else tuple(values) * rank


def _swapped_and_flipped(weight, groups):
    """The weight of a transposed convolution as that of the plain convolution it is."""
    rank = weight.ndim - 2
    grouped = weight.reshape(groups, weight.shape[0] // groups, *weight.shape[1:]).swapaxes(1, 2)
    swapped = grouped.reshape(groups * weight.shape[1], weight.shape[0] // groups, *weight.shape[2:])
    return jnp.flip(swapped, tuple(range(2, 2 + rank)))


def _convolve(input, weight, stride, padding, dilation, transposed, output_padding, groups, *, dtype=None):
    rank = input.ndim - 2
    stride, padding, dilation, output_padding = (
        _each_dim(values, rank) for values in (stride, padding, dilation, output_padding)
    )
    if transposed:
        reach = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
        window_strides, lhs_dilation = (1,) * rank, stride
        pairs = [(r - p, r - p + extra) for r, p, extra in zip(reach, padding, output_padding, strict=True)]
        weight = _swapped_and_flipped(weight, groups)
    else:
        window_strides, lhs_dilation = stride, (1,) * rank
        pairs = [(p, p) for p in padding]
    spatial = "DHW"[-rank:] if rank else ""
    return lax.conv_general_dilated(
        input,
        weight,
        window_strides,
        pairs,
        lhs_dilation=lhs_dilation,
        rhs_dilation=dilation,
        dimension_numbers=(f"NC{spatial}", f"OI{spatial}", f"NC{spatial}"),
        feature_group_count=groups,
        precision=product_precision(input.dtype),
        preferred_element_type=dtype,
    )


@lowering("convolution", on_tpu=NO_INT64_PRODUCTS, one_dtype=("input", "weight", "bias"))
def convolution(input, weight, bias, stride, padding, dilation, transposed, output_padding, groups):
    if min(padding, default=0) < 0:
        raise NotLoweredError("negative padding: PyTorch refuses it, in its own words on the CPU")
    compute = opmath(input.dtype)
    geometry = (stride, padding, dilation, transposed, output_padding, groups)
    result = _convolve(input, weight, *geometry, dtype=compute)
    if bias is None:
        return result
    return result + bias.astype(compute).reshape((-1,) + (1,) * (input.ndim - 2))


@lowering("convolution_backward")
def convolution_backward(
    grad_output, input, weight, bias_sizes,
    stride, padding, dilation, transposed, output_padding, groups, output_mask,
):  # fmt: skip
    geometry = (stride, padding, dilation, transposed, output_padding, groups)
    grad_output = grad_output.astype(input.dtype)
    grad_input = grad_weight = grad_bias = None
    if output_mask[0]:
        transpose = jax.vjp(lambda value: _convolve(value, weight, *geometry), input)[1]
        (grad_input,) = transpose(grad_output)
    if output_mask[1]:
        transpose = jax.vjp(lambda value: _convolve(input, value, *geometry), weight)[1]
        (grad_weight,) = transpose(grad_output)
    if output_mask[2]:
        dims = tuple(axis for axis in range(grad_output.ndim) if axis != 1)
        grad_bias = jnp.sum(grad_output, dims, dtype=opmath(grad_output.dtype))
    return grad_input, grad_weight, grad_bias
