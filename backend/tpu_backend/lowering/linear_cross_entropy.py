"""A linear layer and the cross-entropy of its results, with their gradients: only the logits of a block of
tokens are in memory.

Gradients are computed with the loss, so each block's logits are made once (Liger Kernel, Hsu et al. 2024).
Sizes: N tokens of E features, V classes. 16-bit numbers multiply as they are; all else is in float32. On a
TPU logits of 16-bit numbers are rounded, as those of `linear` are: a block of them stays on the chip.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from tpu_backend.lowering.bounds import require_in_range
from tpu_backend.lowering.matmul import matmul
from tpu_backend.lowering.platforms import lowered_for
from tpu_backend.lowering.registry import is_16_bit, lowering, opmath

BLOCK_BYTES = 2**26
"""A block's logits take so many, unless `_tokens_of_block` wants more: half of a v6e's VMEM. With 32,000
classes the loss of 4,096 tokens and its gradients take 2.2 ms there by the compiler, in blocks of 1,024; in
512, of float32 logits, 2.8 ms.
"""
BLOCK_BYTES_ON_CPU = 2**24
"""There three arrays of a block's size are in memory."""


class _Sums(NamedTuple):
    """Over tokens. None: not asked for."""

    loss: jax.Array
    weights: jax.Array
    grad_weight: jax.Array | None
    grad_bias: jax.Array | None


@lowering("tpu::linear_cross_entropy")
def linear_cross_entropy(
    self, linear_weight, target, linear_bias, token_weight, ignore_index, wanted
):  # fmt: skip
    """Two sums over tokens, of weighted losses and of weights, and the gradients of the first: of the tokens
    (N, E), of the weight (V, E) and of the bias (V), where `wanted` says so. All in float32, or wider.
    """
    tokens, classes = self.shape[0], linear_weight.shape[0]
    require_in_range(target, 0, classes, IndexError, "Target {index} is out of bounds.", allowed=ignore_index)
    is_counted = target != ignore_index
    dtype = opmath(self.dtype)
    weights = is_counted.astype(dtype) if token_weight is None else jnp.where(is_counted, token_weight, 0)
    given = self, jnp.where(is_counted, target, 0).astype(jnp.int32), weights.astype(dtype)

    def of_block(hidden: jax.Array, target: jax.Array, weights: jax.Array) -> tuple[_Sums, jax.Array | None]:
        return _block(hidden, target, weights, linear_weight, linear_bias, wanted)

    size = min(tokens, _tokens_of_block(self.dtype, *linear_weight.shape, has_sums=wanted[1]))
    if size == tokens:
        sums, grad_hidden = of_block(*given)
        return sums.loss, sums.weights, grad_hidden, sums.grad_weight, sums.grad_bias
    count = math.ceil(tokens / size)
    size = math.ceil(tokens / count)
    padded = [jnp.pad(each, ((0, -tokens % size), *[(0, 0)] * (each.ndim - 1))) for each in given]

    def add(i: jax.Array, found: tuple[_Sums, Any]) -> tuple[_Sums, Any]:
        sums, grad_hidden = found
        more, part = of_block(*(lax.dynamic_slice_in_dim(each, i * size, size) for each in padded))
        if part is not None:
            grad_hidden = lax.dynamic_update_slice_in_dim(grad_hidden, part, i * size, 0)
        return jax.tree.map(jnp.add, sums, more), grad_hidden

    nothing = _Sums(
        jnp.zeros((), dtype),
        jnp.zeros((), dtype),
        jnp.zeros(linear_weight.shape, dtype) if wanted[1] else None,
        jnp.zeros(linear_weight.shape[:1], dtype) if wanted[2] else None,
    )
    of_hidden = jnp.zeros((count * size, self.shape[1]), dtype) if wanted[0] else None
    # Of 32 bits: otherwise a TPU's compiler does not know the number of turns.
    sums, of_hidden = lax.fori_loop(jnp.int32(0), jnp.int32(count), add, (nothing, of_hidden))
    grad_hidden = None if of_hidden is None else of_hidden[:tokens]
    return sums.loss, sums.weights, grad_hidden, sums.grad_weight, sums.grad_bias


@lowering("tpu::loss_gradient")
def loss_gradient(self, factor, dtype):
    """A gradient that was computed with the loss, times the one of the loss, in another dtype."""
    return self * factor.astype(self.dtype)  # the cast is the table's


def _tokens_of_block(dtype: jnp.dtype, classes: int, features: int, has_sums: bool) -> int:
    """As many as BLOCK_BYTES allow; on a TPU as many as there are features at least, where the weight's
    gradient is asked for.

    A block reads all weights, and reads and writes the sums for their gradient. With so many tokens a TPU's
    products take longer than that, and the block's logits take no more memory than the sums. Of 128,256
    classes and 2,048 features, 2,048 tokens take a v6e 7 ms at once, and 22 ms in blocks of 256, by its
    compiler.
    """
    itemsize = jnp.dtype(opmath(dtype)).itemsize
    if lowered_for() in (None, "cpu"):
        return max(1, min(BLOCK_BYTES, BLOCK_BYTES_ON_CPU) // (classes * itemsize))
    if lowered_for() == "tpu":
        return tokens_of_block_on_tpu(2 if is_16_bit(dtype) else itemsize, classes, features, has_sums)
    return max(1, BLOCK_BYTES // (classes * itemsize))


def tokens_of_block_on_tpu(itemsize: int, classes: int, features: int, has_sums: bool) -> int:
    """Tokens of a block on a TPU; `itemsize`: of a logit."""
    return max(features if has_sums else 1, BLOCK_BYTES // (classes * itemsize))


def _block(
    hidden: jax.Array,
    target: jax.Array,
    weights: jax.Array,
    linear_weight: jax.Array,
    linear_bias: jax.Array | None,
    wanted: tuple[bool, bool, bool],
) -> tuple[_Sums, jax.Array | None]:
    """The sums over these tokens, and the gradient of `hidden`."""
    if lowered_for() == "tpu" and is_16_bit(hidden.dtype):
        logits = jnp.matmul(hidden, linear_weight.T).astype(opmath(hidden.dtype))
    else:
        logits = matmul(hidden, linear_weight.T)
    if linear_bias is not None:
        logits = logits + linear_bias.astype(logits.dtype)
    shifted = logits - jnp.max(logits, 1, keepdims=True)
    is_target = lax.broadcasted_iota(jnp.int32, logits.shape, 1) == target[:, None]
    if lowered_for() == "tpu":  # see `_selected` in loss.py
        own = jnp.sum(jnp.where(is_target, shifted, 0), 1)
    else:
        own = jnp.take_along_axis(shifted, target[:, None].astype(jnp.uint32), 1, mode="promise_in_bounds")[
            :, 0
        ]
    exponentials = jnp.exp(shifted)
    total = jnp.sum(exponentials, 1)
    is_counted = weights != 0
    loss = jnp.sum(jnp.where(is_counted, weights * (jnp.log(total) - own), 0))
    if not any(wanted):
        return _Sums(loss, jnp.sum(weights), None, None), None
    grad = exponentials * (weights / total)[:, None] - jnp.where(is_target, weights[:, None], 0)
    grad = jnp.where(is_counted[:, None], grad, 0)
    rounded = grad.astype(hidden.dtype)
    grad_hidden = matmul(rounded, linear_weight) if wanted[0] else None
    if lowered_for() == "tpu" and wanted[0] and wanted[1]:
        # In this order a gathered weight is gone before its gradient, as large, is scattered.
        hidden, grad_hidden = lax.optimization_barrier((hidden, grad_hidden))
    return _Sums(
        loss,
        jnp.sum(weights),
        matmul(rounded.T, hidden) if wanted[1] else None,
        jnp.sum(grad, 0) if wanted[2] else None,
    ), grad_hidden
