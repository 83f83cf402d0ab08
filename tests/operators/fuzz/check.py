"""One program judged: on the CPU and on the device, and what is not the same."""

from __future__ import annotations

import random
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tests.operators.compare import Tolerances, difference
from tests.operators.fuzz.program import Line, Program, Results, run, tensors_in

_NOISY_RUNS = 6
_NOISE_FACTOR = 8


@dataclass(frozen=True)
class Failure:
    kind: str  # "values", "dtype", "shape", "strides", "raises", "does not raise", "another error"
    text: str


def check(program: Program) -> Failure | None:
    """What is not the same on the device, if anything."""
    return check_together([program])[0]


def check_together(programs: Sequence[Program]) -> list[Failure | None]:
    """The same for each of several programs of one mode: in fused mode XLA compiles them as one."""
    with warnings.catch_warnings(), torch.tpu.eager_mode(programs[0].mode):
        warnings.simplefilter("ignore")
        results = [run(program.lines, "tpu") for program in programs]
        error = _error_of_reading(results)
        if error is None:
            return [_failure(program.lines, actual) for program, actual in zip(programs, results)]
        if len(programs) > 1:  # whose it is, one after the other tells
            return [check(program) for program in programs]
        if results[0].error is None:
            results = [Results(results[0].variables, error)]
        return [_failure(programs[0].lines, results[0])]


def _failure(lines: list[Line], actual: Results) -> Failure | None:
    expected = run(lines, "cpu")
    if expected.error is not None:
        return _error_difference(expected, actual, lines)
    if actual.error is not None:
        where = lines[actual.at].text if actual.at >= 0 else "when it is read"
        return Failure("raises", f"{where}: {_said(actual.error)}")
    for name, theirs in expected.variables.items():
        text = difference(actual.variables[name], theirs, Tolerances())
        if text is None:
            continue
        kind = next((kind for kind in ("values", "dtype", "shape", "strides") if kind in text[:24]), "values")
        if kind == "values" and _is_noise(lines, name, actual.variables[name], theirs):
            continue
        return Failure(kind, f"{name}: {text}; {_shown(actual.variables[name], theirs)}")
    return None


def _error_of_reading(results: Sequence[Results]) -> Exception | None:
    """What was found out by running, an index out of range, say."""
    try:
        torch.tpu.synchronize()
        for result in results:
            for value in result.variables.values():
                for tensor in tensors_in(value):
                    tensor.cpu()
    except Exception as error:
        return error
    return None


def _error_difference(expected: Results, actual: Results, lines: list[Line]) -> Failure | None:
    text = f"{lines[expected.at].text}: the CPU says {_said(expected.error)}"
    if actual.error is None:
        return Failure("does not raise", text)
    if type(actual.error) is not type(expected.error):
        return Failure("another error", f"{text}, the device {_said(actual.error)}")
    if -1 < actual.at < expected.at:
        return Failure("raises", f"{lines[actual.at].text}: {_said(actual.error)}")
    return None


def _said(error: Exception | None) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"


def _shown(actual: Any, expected: Any) -> str:
    if not isinstance(expected, torch.Tensor):
        return f"{actual!r:.160} where the CPU has {expected!r:.160}"
    try:
        ours, theirs = actual.detach().cpu().flatten().tolist(), expected.detach().flatten().tolist()
    except Exception as error:
        return _said(error)
    return f"{str(ours)[:200]} where the CPU has {str(theirs)[:200]}"


def _is_noise(lines: list[Line], name: str, actual: Any, expected: Any) -> bool:
    """Whether results of the CPU itself differ as much once its roundings move by their last digits."""
    if not any(line.rounds for line in lines):
        return False
    runs = [run(lines, "cpu", random.Random(seed)).variables for seed in range(_NOISY_RUNS)]
    if any(name not in found for found in runs):
        return True
    for position, (ours, theirs) in enumerate(zip(tensors_in(actual), tensors_in(expected))):
        if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
            return False
        shaken = [tensors_in(found[name])[position] for found in runs]
        if any(each.shape != theirs.shape for each in shaken):
            return True
        if not _within(ours.detach().cpu(), theirs.detach(), [each.detach() for each in shaken]):
            return False
    return True


def _within(actual: torch.Tensor, expected: torch.Tensor, shaken: list[torch.Tensor]) -> bool:
    if not (expected.is_floating_point() or expected.is_complex()):
        return torch.equal(actual, expected)
    if expected.is_complex():
        actual, expected, *shaken = (
            torch.view_as_real(each.resolve_conj()) for each in (actual, expected, *shaken)
        )
    wide = expected.double()
    moved = torch.stack([each.double() for each in shaken])
    unsettled = (moved.isfinite() != wide.isfinite()).any(0)
    spread = (moved - wide).abs().nan_to_num(0.0, 0.0, 0.0).amax(0)
    eps = torch.finfo(expected.dtype).eps
    near = (actual.double() - wide).abs() <= _NOISE_FACTOR * (spread + eps * wide.abs())
    same = (actual == expected) | (actual.isnan() & expected.isnan())
    return bool((unsettled | near | same).all())
