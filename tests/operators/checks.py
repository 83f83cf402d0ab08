"""Checks of one entry, collected and then read together, so that one XLA program serves many of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._pytree import tree_leaves

from tests.operators.accuracy import Accuracy, accuracy
from tests.operators.compare import Tolerances, difference, distribution_difference
from tests.operators.outcome import Outcome
from tests.operators.place import CPU, DEVICE, REFERENCE, Place

_CHECKS_A_PROGRAM = 48
_DRAWS = 4000
_MOST_RUNS = 60

Run = Callable[[Place], Any]  # the results in a place, made of its own copies of the arguments


class Checks:
    """Runs a piece of code on both devices and notes in ``outcome`` what differs."""

    def __init__(self, outcome: Outcome, tolerances: Tolerances, initialised: bool = True):
        self._outcome = outcome
        self._tolerances = tolerances
        self._initialised = initialised
        self._waiting: list[Callable[[], None]] = []

    def add(self, what: str, run: Run, may_be_random: bool = True, values: bool = True) -> bool:
        """False where the CPU refuses to run it: there is nothing to compare with.

        ``values=False``: compare shapes, dtypes and strides only.
        """
        try:
            expected = _seeded(run, CPU, 0)
        except Exception:
            return False
        values = values and self._initialised
        random = (
            values and may_be_random and difference(_seeded(run, CPU, 1), expected, Tolerances()) is not None
        )
        try:
            actual = _seeded(run, DEVICE, 0)
        except Exception as error:
            self._outcome.fail(what, f"{type(error).__name__}: {error}")
            return True
        exact = values and not random

        def compare() -> str | None:
            text = difference(actual, expected, self._tolerances, exact)
            if text is not None and exact and may_be_random and _is_random(run, expected):
                return difference(actual, expected, self._tolerances, False) or _draws_difference(
                    run, expected
                )
            return text

        self._later(
            what,
            compare,
            lambda: self._accuracy(run, actual, expected) if exact else None,
        )
        if random:
            self._later(what, lambda: _draws_difference(run, expected))
        return True

    def _later(
        self,
        what: str,
        compare: Callable[[], str | None],
        judge: Callable[[], Accuracy | None] = lambda: None,
    ) -> None:
        def run() -> None:
            judged = None
            try:
                text = compare()
            except Exception as error:
                text = f"{type(error).__name__}: {error}"
            else:
                judged = judge() if text is not None else None
            if text is not None:
                found = f"{judged}; {text}" if judged else text
                self._outcome.fail(what, found, accurate=judged is not None and judged.as_near)

        self._waiting.append(run)
        if len(self._waiting) >= _CHECKS_A_PROGRAM:
            self.read()

    def _accuracy(self, run: Run, actual: Any, expected: Any) -> Accuracy | None:
        if difference(actual, expected, self._tolerances, values=False) is not None:
            return None
        try:
            reference = _seeded(run, REFERENCE, 0)
        except Exception:
            return None  # there is no float64 kernel
        return accuracy(actual, expected, reference, self._tolerances)

    def read(self) -> None:
        """Compare what has been recorded so far."""
        for compare in self._waiting:
            compare()
        self._waiting.clear()


def _seeded(run: Run, place: Place, seed: int) -> Any:
    # Not torch.manual_seed: it asks every kind of device, for a millisecond.
    torch.default_generator.manual_seed(seed)
    torch.tpu.manual_seed_all(seed)
    with patch.object(torch, "manual_seed", lambda _: torch.default_generator):  # some entries seed each call
        return run(place)


def _is_random(run: Run, expected: Any) -> bool:
    """Whether more seeds tell: a few draws, rounded to places in a plane, may well be the same for two."""
    return any(
        difference(_seeded(run, CPU, seed), expected, Tolerances()) is not None for seed in range(2, 8)
    )


def _draws_difference(run: Run, example: Any) -> str | None:
    """Compare the distribution of each floating or integer output, over enough runs on both sides."""
    counts = [numbers.numel() for numbers in _numbers(example)]
    if not counts:
        return None
    runs = min(-(-_DRAWS // min(counts)), _MOST_RUNS)
    draws = {place: [_numbers(_seeded(run, place, seed)) for seed in range(runs)] for place in (CPU, DEVICE)}
    for position in range(len(counts)):
        ours, theirs = (
            torch.stack([numbers[position] for numbers in draws[place]]) for place in (DEVICE, CPU)
        )
        text = distribution_difference(ours, theirs)
        if text is not None:
            return text
    return None


def _numbers(results: Any) -> list[torch.Tensor]:
    """The independent draws in each output: beyond two dims one may hold for all, as in feature dropout."""
    return [
        leaf.detach().cpu().resolve_conj()[_INDEPENDENT[: leaf.dim()]].reshape(-1)
        for leaf in tree_leaves(results)
        if isinstance(leaf, torch.Tensor) and leaf.numel()
    ]


_INDEPENDENT = (slice(None), slice(None), 0, 0, 0, 0)
