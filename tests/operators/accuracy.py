"""Where two results differ beyond the tolerance: which of them is nearer to the result in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from tests.operators.compare import Tolerances, difference

# Neither of two results that are equally far from the true one is the better: within this they are equal.
_AS_NEAR = 2.0


@dataclass(frozen=True)
class Accuracy:
    """Greatest distances from the reference, in the output that differs and that the device has worst."""

    device: float
    cpu: float

    @property
    def as_near(self) -> bool:
        return self.device <= _AS_NEAR * self.cpu

    def __str__(self) -> str:
        return f"from float64 the device is {self.device:.1e} off, the CPU {self.cpu:.1e}"


def accuracy(actual: Any, expected: Any, reference: Any, tolerances: Tolerances) -> Accuracy | None:
    """None where something besides rounding differs: integers, what is NaN or infinite."""
    triples = list(zip(*(tree_leaves(results) for results in (actual, expected, reference)), strict=True))
    worst: Accuracy | None = None
    for ours, theirs, exact in triples:
        if difference(ours, theirs, tolerances) is None:
            continue
        if not (isinstance(exact, torch.Tensor) and (exact.is_floating_point() or exact.is_complex())):
            return None
        ours, theirs = (result.detach().cpu().to(exact.dtype) for result in (ours, theirs))
        finite = exact.isfinite()
        if not (torch.equal(ours.isfinite(), finite) and torch.equal(theirs.isfinite(), finite)):
            return None
        exact = exact.detach()[finite]
        found = Accuracy(*(_distance(result[finite], exact) for result in (ours, theirs)))
        if worst is None or not found.as_near or (worst.as_near and found.device > worst.device):
            worst = found
    return worst


def _distance(result: torch.Tensor, exact: torch.Tensor) -> float:
    return (result - exact).abs().max().item() if exact.numel() else 0.0
