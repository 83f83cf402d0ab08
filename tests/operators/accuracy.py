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
    """Greatest distances from the reference in units of the tolerance, in the output that compares worst."""

    device: float
    cpu: float

    @property
    def as_near(self) -> bool:
        return self.device <= _AS_NEAR * self.cpu

    def __str__(self) -> str:
        return f"from float64 the device is {self.device:.2g} tolerances off, the CPU {self.cpu:.2g}"


def accuracy(actual: Any, expected: Any, reference: Any, tolerances: Tolerances) -> Accuracy | None:
    """None where something besides rounding differs: integers, what is NaN or infinite on the device.

    The CPU may overflow where the device does not, as it does in 16-bit floats between two operators.
    """
    leaves = [tree_leaves(results) for results in (actual, expected, reference)]
    if len({len(of_one) for of_one in leaves}) > 1:
        return None
    triples = zip(*leaves, strict=True)
    worst: Accuracy | None = None
    for ours, theirs, exact in triples:
        if difference(ours, theirs, tolerances) is None:
            continue
        if not (isinstance(exact, torch.Tensor) and (exact.is_floating_point() or exact.is_complex())):
            return None
        rtol, atol = tolerances.for_dtype(theirs.dtype)
        exact = exact.detach()
        finite = exact.to(theirs.dtype).isfinite()  # not beyond the dtype
        ours, theirs = (result.detach().cpu().to(exact.dtype) for result in (ours, theirs))
        if not torch.equal(ours.isfinite(), finite) or bool((theirs.isfinite() & ~finite).any()):
            return None
        exact = exact[finite]
        allowed = atol + rtol * exact.abs()
        found = Accuracy(*(_distance(result[finite], exact, allowed) for result in (ours, theirs)))
        if worst is None or not found.as_near or (worst.as_near and found.device > worst.device):
            worst = found
    return worst


def _distance(result: torch.Tensor, exact: torch.Tensor, allowed: torch.Tensor) -> float:
    """The greatest one; NaN or infinity in place of a number counts as one tolerance."""
    distances = torch.where(result.isfinite(), (result - exact).abs() / allowed, 1.0)
    return distances.max().item() if exact.numel() else 0.0
