"""Checks for the `__post_init__` of configuration dataclasses, whose errors name key, value and way out."""

import math
from collections.abc import Collection
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from numbers import Real
from typing import Any

from tputrain.errors import UserError


def expect(holds: bool, key: str, value: object, expected: str) -> None:
    """Raise UserError `key=value: expected ...` unless `holds`. `key` is dotted, from the top."""
    if not holds:
        on_one_line = " ".join(spelled(value).split())
        raise UserError(f"{key}={on_one_line}: expected {expected}")


def spelled(value: object) -> str:
    """`value` as one writes it in a recipe or behind `key=`."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def expect_choice(key: str, value: str, choices: Collection[str]) -> None:
    """`value` is one of `choices`."""
    hint = nearest(value, choices)
    suggestion = f"; did you mean {hint}?" if hint else ""
    expect(value in choices, key, value, f"one of {', '.join(choices)}{suggestion}")


def expect_groups(config: Any) -> None:
    """Each group of the dataclass `config` is one: from Python, `trainer={"steps": 3}` may come."""
    for entry in fields(config):
        kind: Any = entry.default_factory
        if isinstance(kind, type) and is_dataclass(kind):
            given = getattr(config, entry.name)
            expect(
                isinstance(given, kind), entry.name, given, f"a {kind.__name__}, such as {kind.__name__}()"
            )


def expect_at_least(key: str, value: float | None, least: float) -> None:
    """`value` is None or a finite number from `least` up."""
    expect(value is None or (_is_finite(value) and value >= least), key, value, f"{least} or more")


def expect_above(key: str, value: float | None, bound: float) -> None:
    """`value` is None or a finite number above `bound`."""
    expect(value is None or (_is_finite(value) and value > bound), key, value, f"a number above {bound}")


def expect_share(key: str, value: float) -> None:
    """`value` is from 0 to 1."""
    expect(_is_finite(value) and 0.0 <= value <= 1.0, key, value, "a share from 0 to 1")


def _is_finite(value: object) -> bool:
    """Whether `value` is a number at all: from Python it may be anything."""
    return isinstance(value, Real) and math.isfinite(value)


def nearest(name: str, known: Collection[str]) -> str | None:
    """The known name that `name` was most likely meant to be, or None where none resembles it."""
    return next(iter(get_close_matches(name, known, n=1, cutoff=0.5)), None)
