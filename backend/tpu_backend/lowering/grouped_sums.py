"""Products of groups of rows, summed over each group, by JAX's Pallas kernel for TPUs (megablox).

They are the gradients of matrices that have a group of rows each, as experts have. XLA multiplies all rows
for each group, most of them made zero: with 32 experts that is 32 times the work. For the products themselves
it has a kernel of its own.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from tpu_backend.lowering.platforms import lowered_for

_ROWS = (512, 256, 128)
"""Rows of a block, the best first. One of them divides those that there are, filled up."""
_WASTE = 1 / 4
"""Of the work, at most, is for blocks with rows of two groups, which are computed for each."""
_FEATURES = 1024
"""Columns of a block, at most. With 2,048 a block takes more than a v5e gives a kernel."""


def fits(left: jax.Array, right: jax.Array, sizes: jax.Array) -> bool:
    """Whether the kernel computes it."""
    return (
        lowered_for() == "tpu"
        and sizes.size > 0
        and left.dtype == right.dtype == jnp.bfloat16
        and min(*left.shape, right.shape[1]) >= _ROWS[-1]
    )


def grouped_sums(
    left: jax.Array, right: jax.Array, sizes: jax.Array, dtype: Any, interpret: bool = False
) -> jax.Array:
    """(M, K) and (M, N), whose rows are of G groups, the first `sizes[0]` of the first one: (G, K, N). Rows
    behind the last group count nowhere.
    """
    from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm  # where a TPU's program needs it

    filled = [jnp.pad(each, ((0, -each.shape[0] % _ROWS[-1]), (0, 0))) for each in (left, right)]
    count = filled[0].shape[0]
    most = max(_ROWS[-1], _WASTE * count / sizes.shape[0])
    rows = next(size for size in _ROWS if count % size == 0 and size <= most)
    tiles = rows, min(_FEATURES, left.shape[1]), min(_FEATURES, right.shape[1])
    with jax.enable_x64(False):
        sums: jax.Array = tgmm(
            filled[0].T, filled[1], sizes.astype(jnp.int32), dtype, tiles, interpret=interpret
        )
    return sums
