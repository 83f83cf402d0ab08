"""Checks for the `__post_init__` of configuration dataclasses, whose errors name key, value and way out."""

import math
from collections.abc import Collection
from difflib import get_close_matches

from tputrain.errors import UserError


def expect(holds: bool, key: str, value: object, expected: str) -> None:
    """Raise UserError `key=value: expected ...` unless `holds`. `key` is dotted, from the top."""
    if not holds:
        on_one_line = " ".join(str(value).split())
        raise UserError(f"{key}={on_one_line}: expected {expected}")


def expect_choice(key: str, value: str, choices: Collection[str]) -> None:
    """`value` is one of `choices`."""
    hint = nearest(value, choices)
    suggestion = f"; did you mean {hint}?" if hint else ""
    expect(value in choices, key, value, f"one of {', '.join(choices)}{suggestion}")


def expect_at_least(key: str, value: float | None, least: float) -> None:
    """`value` is None or a finite number from `least` up."""
    expect(value is None or (math.isfinite(value) and value >= least), key, value, f"{least} or more")


def expect_above(key: str, value: float | None, bound: float) -> None:
    """`value` is None or a finite number above `bound`."""
    expect(value is None or (math.isfinite(value) and value > bound), key, value, f"a number above {bound}")


def expect_share(key: str, value: float) -> None:
    """`value` is from 0 to 1."""
    expect(0.0 <= value <= 1.0, key, value, "a share from 0 to 1")


def nearest(name: str, known: Collection[str]) -> str | None:
    """The known name that `name` was most likely meant to be, or None where none resembles it."""
    return next(iter(get_close_matches(name, known, n=1, cutoff=0.5)), None)
