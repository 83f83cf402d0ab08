"""A process of its own that compiles batches of calls for TPU chips; the compiler may end it.

Started by ``compiler.py`` with a file of pickled calls.  It reads one line a batch, in JSON the chip and a
list of positions in that file, and answers with one JSON line: null, or what the compiler objects to.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
from pathlib import Path

import jax

from tests.tpu.call import Call
from tests.tpu.chips import target


def compile_together(calls: list[Call], chip: str) -> None:
    """Compile one program that makes all these calls, each on inputs of its own; raises what JAX raises."""
    sharding = target(chip).placement
    inputs = [
        [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding) for leaf in call.inputs()]
        for call in calls
    ]

    def run(all_arrays: list[list[jax.Array]]) -> list[tuple[jax.Array | None, ...]]:
        return [call.evaluate(arrays) for call, arrays in zip(calls, all_arrays, strict=True)]

    with jax.enable_x64(True):
        jax.jit(run, out_shardings=sharding).lower(inputs).compile()


def main() -> None:
    calls: list[Call] = pickle.loads(Path(sys.argv[1]).read_bytes())
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libtpu writes to standard output as well
    for line in sys.stdin:
        chip, positions = json.loads(line)
        problem = None
        try:
            compile_together([calls[position] for position in positions], chip)
        except Exception as error:
            problem = f"{type(error).__name__}: {' '.join(str(error).split())}"
        print(json.dumps(problem), file=answers, flush=True)


if __name__ == "__main__":
    main()
