"""How deep a program chains reshapes that XLA:CPU would fuse: its compile time grows exponentially with that.

A fusion's emitter computes each element by its index alone. Behind a reshape that merges dims the one index
of the result stands twice in the indices of the operand, as a quotient and as a remainder; where a
transposition, a slice or a concatenation lies in between, the next reshape cannot undo that. So expressions
double with each turn of such a chain: ten take half a second, twelve five, 25 minutes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax

# Computed into memory: what reads them begins a chain.
_ENDS = frozenset(
    f"stablehlo.{name}"
    for name in (
        "case",
        "cholesky",
        "convolution",
        "custom_call",
        "dot",
        "dot_general",
        "fft",
        "if",
        "reduce",
        "reduce_window",
        "rng_bit_generator",
        "scatter",
        "select_and_scatter",
        "sort",
        "triangular_solve",
        "while",
    )
)


def longest_chain(lowered: jax.stages.Lowered) -> int:
    """Of the reshapes that merge dims, how many follow each other at most in one chain of fusible operations.

    A function of the program's text, and so of the tape.
    """
    module: Any = lowered.compiler_ir("stablehlo")
    functions = {each.attributes["sym_name"].value: each for each in module.body.operations}
    main = functions["main"]
    return _walk(main, [0] * len(main.regions[0].blocks[0].arguments), functions)[1]


def _walk(function: Any, given: Sequence[int], functions: dict[str, Any]) -> tuple[list[int], int]:
    """The depths of a function's results where its arguments have those `given`, and the largest in it."""
    block = function.regions[0].blocks[0]
    depths: dict[Any, int] = dict(zip(block.arguments, given, strict=True))
    largest = max(given, default=0)
    for operation in block.operations:
        name = operation.operation.name
        read = [depths.get(operand, 0) for operand in operation.operands]
        if name == "func.return":
            return read, largest
        if name == "func.call":
            made, inside = _walk(functions[operation.attributes["callee"].value], read, functions)
            largest = max(largest, inside)
        else:
            depth = 0 if name in _ENDS else max(read, default=0)
            if name == "stablehlo.reshape":
                depth += _merges(operation.operands[0].type.shape, operation.results[0].type.shape)
                largest = max(largest, depth)
            made = [depth] * len(operation.results)
        depths.update(zip(operation.results, made, strict=True))
    raise AssertionError(f"{function.attributes['sym_name']} returns nothing")


def _merges(before: Sequence[int], after: Sequence[int]) -> bool:
    """Whether some dim of a reshape's result is made of several of its operand."""
    old, new = ([size for size in sizes if size != 1] for sizes in (before, after))
    if 0 in old:
        return False
    while old:
        taken, made = [old.pop()], [new.pop()]
        while math.prod(taken) != math.prod(made):
            if math.prod(taken) < math.prod(made):
                taken.append(old.pop())
            else:
                made.append(new.pop())
        if len(taken) > 1:
            return True
    return False
