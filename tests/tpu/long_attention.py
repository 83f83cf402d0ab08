"""Attention of long sequences, forward and backward, compiled for TPU chips.

Run as a process of its own: it loads libtpu.  Prints as JSON, for each chip, length and number of ranks that
share a sequence, the bytes of temporary memory and the kinds of kernels in the program.
The first chip has all lengths, and the last one with a window too; the others the first one.
`python -m tests.tpu.long_attention 8192 16384` compiles these lengths instead.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import jax
import jax.numpy as jnp

from tests.tpu.chips import TOPOLOGIES, target
from tpu_backend import hlo
from tpu_backend.lowering import TABLE, apply
from tpu_backend.lowering.platforms import lowering_for

HEADS, KEY_HEADS, FEATURES = 4, 2, 64
LENGTHS = (2048, 4096)
WINDOW = 1024
NAME = "_scaled_dot_product_efficient_attention"


def gradients(
    query: jax.Array, key: jax.Array, value: jax.Array, ids: jax.Array, grad: jax.Array
) -> tuple[jax.Array | None, ...]:
    """Of the operation and its backward, as the device calls them."""
    log_sums = jax.ShapeDtypeStruct(query.shape[:3], jnp.float32)
    given = [query, key, value, ids, True, 0.0, True]
    output, sums, *_ = apply(TABLE[NAME], given, {}, (query, log_sums, None, None))
    given = [grad, query, key, value, ids, output, sums, None, None, 0.0, (True, True, True, False), True]
    return apply(TABLE[f"{NAME}_backward"], given, {}, (query, key, value, None))


def compiled_for(chip: str, length: int, ranks: int, window: int = 1) -> dict[str, Any]:
    """What a rank compiles: its part of the queries over all keys, from a place on that is data.

    `window`: how many keys a query sees; 1 is none.
    """
    placed = target(chip).placement
    query, key, value, grad = (
        jax.ShapeDtypeStruct((1, heads, size, FEATURES), jnp.bfloat16, sharding=placed)
        for heads, size in (
            (HEADS, length // ranks),
            (KEY_HEADS, length),
            (KEY_HEADS, length),
            (HEADS, length // ranks),
        )
    )
    num_ids = length if ranks == 1 else length // ranks + length + 1
    ids = jax.ShapeDtypeStruct((1, 1, window, num_ids), jnp.int64, sharding=placed)
    with jax.enable_x64(True), lowering_for("tpu"):
        compiled = jax.jit(gradients).lower(query, key, value, ids, grad).compile()
    program = hlo.program(compiled.as_text())
    instructions = [each for some in program.computations.values() for each in some]
    kernels = [each.attention_kernel for each in instructions if each.is_pallas_kernel]
    return {
        "chip": chip,
        "length": length,
        "ranks": ranks,
        "window": window,
        "temporaries": compiled.memory_analysis().temp_size_in_bytes,
        "kernels": {each.kind: each.pairs for each in kernels if each is not None},
    }


def main(lengths: tuple[int, ...]) -> None:
    found = [
        compiled_for(chip, length, ranks)
        for place, chip in enumerate(TOPOLOGIES)
        for length in (lengths if place == 0 else lengths[:1])
        for ranks in (1, 2)
    ]
    found.append(compiled_for(next(iter(TOPOLOGIES)), lengths[-1], ranks=1, window=WINDOW))
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main(tuple(map(int, sys.argv[1:])) or LENGTHS)
