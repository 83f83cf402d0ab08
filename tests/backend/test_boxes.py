"""What the recorder calls a box at a runtime offset, the lowering can cut out of the base."""

from __future__ import annotations

import math
import random

import numpy as np
import torch

from tpu_backend import _C
from tpu_backend.views import Geometry, _digits, _joined_dims

NUM_VIEWS = 4000


def _random_view(rng: random.Random, base: list[int]) -> torch.Tensor:
    """A few slices, selects, transposes, expands, unfolds and as_strideds of a contiguous tensor."""
    view = torch.arange(math.prod(base)).reshape(base)
    for _ in range(rng.randint(0, 4)):
        if view.dim() == 0 or view.numel() == 0:
            break
        dim = rng.randrange(view.dim())
        kind = rng.choice(["slice", "slice", "select", "transpose", "expand", "flatten", "unfold", "strided"])
        if kind == "slice":
            start = rng.randrange(view.size(dim) + 1)
            stop = rng.randint(start, view.size(dim))
            view = view[(slice(None),) * dim + (slice(start, stop, rng.choice([1, 1, 2, 3])),)]
        elif kind == "select":
            view = view.select(dim, rng.randrange(view.size(dim)))
        elif kind == "transpose":
            view = view.transpose(dim, rng.randrange(view.dim()))
        elif kind == "expand":
            view = view.unsqueeze(dim).expand(*view.shape[:dim], 2, *view.shape[dim:])
        elif kind == "flatten" and view.is_contiguous():
            view = view.reshape(-1)
        elif kind == "unfold":
            view = view.unfold(dim, rng.randint(1, view.size(dim)), rng.randint(1, 2))
        elif kind == "strided":
            sizes = [rng.randint(1, 3) for _ in range(rng.randint(1, 3))]
            strides = [rng.randint(0, 4) for _ in sizes]
            extent = 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
            if extent <= math.prod(base):
                view = view.as_strided(sizes, strides, rng.randint(0, math.prod(base) - extent))
    return view


def test_a_view_is_a_box_where_the_lowering_finds_digits_that_fit() -> None:
    rng = random.Random(0)
    answers = {True: 0, False: 0}
    for _ in range(NUM_VIEWS):
        base = [rng.choice([1, 2, 3, 4, 5, 6, 8]) for _ in range(rng.randint(0, 4))]
        view = _random_view(rng, base)
        geometry = Geometry(tuple(view.shape), view.stride(), view.storage_offset(), np.dtype(np.int64))
        digits = _digits(base, _joined_dims(geometry), None)
        expected = not view.numel() or (digits is not None and all(d.fits(geometry.offset) for d in digits))
        assert _C.is_box(base, list(view.shape), list(view.stride()), view.storage_offset()) == expected, (
            base,
            geometry,
        )
        answers[expected] += 1
    assert min(answers.values()) > NUM_VIEWS // 50
