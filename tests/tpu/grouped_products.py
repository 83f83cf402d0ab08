"""Products of groups of rows and their gradients, as experts have them, compiled for TPU chips.

Run as a process of its own: it loads libtpu. Prints as JSON, for each chip, the FLOPs of each kernel in the
program by their authors, and the compiler's cycles of all else.
"""

from __future__ import annotations

import json
from typing import Any

import jax
import jax.numpy as jnp

from tests.tpu.chips import TOPOLOGIES, target
from tpu_backend import hlo
from tpu_backend.lowering import TABLE, apply
from tpu_backend.lowering.platforms import lowering_for

ROWS, FEATURES, HIDDEN, GROUPS = 4096, 512, 384, 8


def products(
    rows: jax.Array, weights: jax.Array, ends: jax.Array, grad: jax.Array
) -> tuple[jax.Array | None, ...]:
    """The product, and the gradients of rows and of weights."""

    def grouped(left: jax.Array, right: jax.Array, shape: tuple[int, ...]) -> jax.Array | None:
        out = (jax.ShapeDtypeStruct(shape, jnp.bfloat16),)
        return apply(TABLE["_grouped_mm"], [left, right, ends], {}, out)[0]

    return (
        grouped(rows, weights, grad.shape),
        grouped(grad, weights.swapaxes(1, 2), rows.shape),
        grouped(rows.T, grad, weights.shape),
    )


def compiled_for(chip: str) -> dict[str, Any]:
    placed = target(chip).placement
    shapes = (ROWS, FEATURES), (GROUPS, FEATURES, HIDDEN), (ROWS, HIDDEN)
    rows, weights, grad = (jax.ShapeDtypeStruct(each, jnp.bfloat16, sharding=placed) for each in shapes)
    ends = jax.ShapeDtypeStruct((GROUPS,), jnp.int32, sharding=placed)
    with jax.enable_x64(True), lowering_for("tpu"):
        compiled = jax.jit(products).lower(rows, weights, ends, grad).compile()
    program = hlo.program(compiled.as_text())
    instructions = program.computations[program.entry]
    return {
        "chip": chip,
        "flops": [each.kernel_flops for each in instructions if each.kernel_flops],
        "cycles": sum(each.cycles or 0 for each in instructions),
    }


def main() -> None:
    print(json.dumps([compiled_for(chip) for chip in TOPOLOGIES]))


if __name__ == "__main__":
    main()
