"""What "the same result" means: value (distribution, where it is random), shape, dtype and strides."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.testing._comparison import default_tolerances
from torch.utils._pytree import tree_flatten

# Draws of one distribution differ by more than this once in 100,000 times (Kolmogorov-Smirnov, in units of
# sqrt(1/n + 1/m)).
_KS_BOUND = 2.47

# Fewer runs say nothing about their scatter.
_LEAST_RUNS = 10


@dataclass
class Tolerances:
    """PyTorch's defaults for the dtype that is compared; what an entry declares for its dtype widens them."""

    declared: dict[torch.dtype, tuple[float, float]] = field(default_factory=dict)

    @staticmethod
    def of(info: Any, dtype: torch.dtype) -> Tolerances:
        """With the widest override that the entry declares for this dtype in an eager test.

        There are two kinds: ``toleranceOverride`` (rtol and atol) and ``precisionOverride`` (atol).
        """
        declared: dict[torch.dtype, tuple[float, float]] = {}
        for decoration in getattr(info, "decorators", None) or ():
            if "Inductor" in (getattr(decoration, "cls_name", None) or ""):
                continue
            for decorator in getattr(decoration, "decorators", [decoration]):
                overrides = getattr(decorator, "d", None)
                if isinstance(overrides, dict) and dtype in overrides:
                    rtol, atol = declared.get(dtype, (0.0, 0.0))
                    override = overrides[dtype]
                    given = (0.0, override) if isinstance(override, float) else (override.rtol, override.atol)
                    declared[dtype] = max(rtol, given[0]), max(atol, given[1])
        return Tolerances(declared)

    def for_dtype(self, dtype: torch.dtype) -> tuple[float, float]:
        rtol, atol = default_tolerances(dtype)
        declared = self.declared.get(dtype, (0.0, 0.0))
        return max(rtol, declared[0]), max(atol, declared[1])


def difference(actual: Any, expected: Any, tolerances: Tolerances, values: bool = True) -> str | None:
    """What is not the same in two results (tensors, numbers, nested), in one line; None where nothing is.

    ``values=False`` compares all but values: for what is random or not initialised.
    """
    actual_leaves, actual_tree = tree_flatten(actual)
    expected_leaves, expected_tree = tree_flatten(expected)
    if len(actual_leaves) != len(expected_leaves):
        return f"structure {actual_tree} where the CPU has {expected_tree}"
    for position, (ours, theirs) in enumerate(zip(actual_leaves, expected_leaves)):
        text = _leaf_difference(ours, theirs, tolerances, values)
        if text is not None:
            return f"output {position}: {text}" if len(actual_leaves) > 1 else text
    return None


def _leaf_difference(actual: Any, expected: Any, tolerances: Tolerances, values: bool) -> str | None:
    if not isinstance(expected, torch.Tensor):
        if isinstance(expected, (float, complex)) and values:
            actual, expected = torch.tensor(actual), torch.tensor(expected)
        elif type(actual) is not type(expected) or (values and not _equal(actual, expected)):
            return f"{actual!r} where the CPU has {expected!r}"
        else:
            return None
    if not isinstance(actual, torch.Tensor):
        return f"{type(actual).__name__} where the CPU has a tensor"
    if actual.shape != expected.shape:
        return f"shape {tuple(actual.shape)} where the CPU has {tuple(expected.shape)}"
    if actual.dtype != expected.dtype:
        return f"dtype {actual.dtype} where the CPU has {expected.dtype}"
    if actual.layout != expected.layout:
        return f"layout {actual.layout} where the CPU has {expected.layout}"
    if expected.layout == torch.strided and _significant(actual) != _significant(expected):
        return (
            f"strides {actual.stride()} where the CPU has {expected.stride()}, shape {tuple(expected.shape)}"
        )
    if actual.requires_grad != expected.requires_grad:
        return f"requires_grad {actual.requires_grad} where the CPU has {expected.requires_grad}"
    if not values:
        return None
    rtol, atol = tolerances.for_dtype(expected.dtype)
    try:
        torch.testing.assert_close(
            actual.detach().cpu(), expected.detach(), rtol=rtol, atol=atol, equal_nan=True, check_device=False
        )
    except (AssertionError, RuntimeError) as error:  # RuntimeError: some infinite complex numbers that differ
        return f"values, {expected.dtype} {tuple(expected.shape)}: {' '.join(str(error).split())[:200]}"
    return None


def _equal(actual: Any, expected: Any) -> bool:
    if isinstance(expected, torch.device):
        return True
    return bool(actual == expected)


def _significant(tensor: torch.Tensor) -> list[int]:
    """Strides that decide where an element lies: those of dims longer than 1, where there are elements."""
    if tensor.numel() == 0:
        return []
    return [stride for size, stride in zip(tensor.shape, tensor.stride()) if size > 1]


def distribution_difference(actual: torch.Tensor, expected: torch.Tensor) -> str | None:
    """None where two sets of draws (runs, draws), on the CPU, may well come from one distribution.

    The draws of a run may depend on each other (dropout in front of a product): the bound is as wide as
    the scatter of the CPU's runs asks for.
    """
    if actual.is_complex():
        return distribution_difference(actual.real, expected.real) or distribution_difference(
            actual.imag, expected.imag
        )
    ours, theirs = (draws.double().flatten().sort().values for draws in (actual, expected))
    if ours.isnan().sum() or theirs.isnan().sum():
        return None if bool(ours.isnan().any()) == bool(theirs.isnan().any()) else "NaN on one side only"
    points = torch.cat([ours, theirs])
    rtol, atol = default_tolerances(expected.dtype)
    rounding = atol + rtol * points.abs()  # many draws may be one number, rounded differently

    def cdf(draws: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        return torch.searchsorted(draws, at, right=True) / draws.numel()

    below, above = cdf(ours, points - rounding), cdf(ours, points + rounding)
    distance, place = torch.maximum(cdf(theirs, points) - above, below - cdf(theirs, points)).max(0)
    bound = _KS_BOUND * (1 / ours.numel() + 1 / theirs.numel()) ** 0.5
    bound *= _design_effect((expected <= points[place]).double()) ** 0.5
    if distance <= bound:
        return None
    return f"distribution: KS distance {distance:.3f} to the CPU's draws, at most {bound:.3f} expected"


def _design_effect(hits: torch.Tensor) -> float:
    """How much wider the mean of (runs, draws) scatters than that of as many independent draws."""
    runs, draws = hits.shape
    independent = hits.mean() * (1 - hits.mean()) / draws
    if runs < _LEAST_RUNS or independent == 0:
        return 1.0
    return max(1.0, (hits.mean(1).var() / independent).item())
