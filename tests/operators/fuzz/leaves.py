"""Tensors that programs begin with: few shapes, every dtype, and values at which kernels go wrong."""

from __future__ import annotations

import math
import random

import torch

INTEGERS = ("uint8", "int8", "int16", "int32", "int64")
FLOATS = ("float16", "bfloat16", "float32", "float64")
DTYPES = ("bool", *INTEGERS, *FLOATS, "complex64")
_WEIGHTS = (3, 3, 2, 2, 3, 5, 3, 3, 8, 3, 2)

# Few, so that programs share the recorder's forms of operators.
SHAPES = (
    (),
    (0,),
    (1,),
    (3,),
    (4,),
    (6,),
    (2, 3),
    (3, 3),
    (3, 1),
    (1, 3),
    (0, 3),
    (2, 0),
    (2, 1, 3),
    (2, 3, 4),
)
_SHAPE_WEIGHTS = (3, 1, 2, 6, 5, 4, 7, 5, 2, 2, 1, 1, 2, 3)

_PLAIN = (0.0, 1.0, -1.0, 2.0, 0.5, -0.5, 3.0, -2.5, 1.5, 2.5, 0.25, -3.0, 7.0, 2.0, 1.0)
_SPECIAL = (math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, -1.0, 2.5)
_LARGE = (2.0**24 + 1, 2.0**31, -(2.0**31), 65504.0, 65520.0, -70000.0, 1e10, 2.0**53 + 2, 255.0, 256.0, 1e-3)


def random_dtype(chance: random.Random) -> str:
    return chance.choices(DTYPES, _WEIGHTS)[0]


def random_shape(chance: random.Random) -> tuple[int, ...]:
    return chance.choices(SHAPES, _SHAPE_WEIGHTS)[0]


def leaf(chance: random.Random, shape: tuple[int, ...], dtype: str) -> str:
    """An expression in Python that makes a tensor on ``device``."""
    pool = _pool(chance, dtype)
    values = [chance.choice(pool) for _ in range(math.prod(shape))]
    text = f"torch.tensor([{', '.join(map(str, values))}], dtype=torch.{dtype}, device=device)"
    return text if shape == (len(values),) else f"{text}.reshape({shape})"


def scalar(chance: random.Random) -> str:
    """A Python number of any kind, as text."""
    kind = chance.randrange(10)
    if kind == 0:
        return str(chance.choice((True, False)))
    if kind < 5:
        return str(
            chance.choice((0, 1, 2, 3, -1, -2, 5, 255, 256, 128, -129, 2**24 + 1, 2**31, 2**53 + 1, -(2**40)))
        )
    if kind < 9:
        return str(chance.choice((*_PLAIN, *_PLAIN, *_SPECIAL, *_LARGE, 0.1, -1e9, 65520.0, 3.4e38)))
    return str(chance.choice((1j, 2 - 1j, 0.5 + 0j)))


def _pool(chance: random.Random, dtype: str) -> list[object]:
    if dtype == "bool":
        return [True, False]
    if dtype in INTEGERS:
        bounds = torch.iinfo(getattr(torch, dtype))
        small = [0, 1, 2, 3, 1, 2, 5, 7] + ([] if bounds.min == 0 else [-1, -2, -3])
        if chance.random() < 0.7:
            return small
        edges = [bounds.min, bounds.max, bounds.min + 1, bounds.max - 1, bounds.max // 2 + 1, 100]
        more = [
            value
            for value in (2**24 + 1, 2**31 - 1, -(2**31), 2**53 + 1)
            if bounds.min <= value <= bounds.max
        ]
        return small[:3] + edges + more
    kind = chance.random()
    if kind < 0.65:
        pool = list(_PLAIN)
    elif kind < 0.85:
        pool = list(_SPECIAL)
    else:
        largest = torch.finfo(getattr(torch, "float32" if dtype == "complex64" else dtype)).max
        pool = [*_LARGE, largest, -largest, 0.0, 1.0]
    if dtype == "complex64":
        return [_complex(chance.choice(pool), chance.choice(pool)) for _ in range(12)]
    return list(pool)


def _complex(real: float, imaginary: float) -> str:
    return f"complex({real}, {imaginary})"
