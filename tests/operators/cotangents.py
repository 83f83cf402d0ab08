"""What a gradient is taken with: the same numbers in every place."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tests.operators.place import Place


class Cotangents:
    """Random cotangents of outputs, rounded to the dtypes that the outputs of the first run have.

    So a reference run in wider dtypes gets the numbers that the others had.
    """

    def __init__(self) -> None:
        self._dtypes: list[torch.dtype] = []

    def of(self, outputs: Sequence[torch.Tensor], place: Place) -> list[torch.Tensor]:
        if not self._dtypes:
            self._dtypes = [output.dtype for output in outputs]
        generator = torch.Generator().manual_seed(0)
        return [
            place.to(torch.randn(output.shape, dtype=dtype, generator=generator))
            for output, dtype in zip(outputs, self._dtypes, strict=True)
        ]
