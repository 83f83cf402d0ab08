"""Checks for the `__post_init__` of configuration dataclasses, whose errors name key, value and way out."""

import math
from collections.abc import Collection
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from inspect import signature
from numbers import Real
from types import UnionType
from typing import Any, Self, Union, get_args, get_origin, get_type_hints

from tputrain.errors import UserError


def expect(holds: bool, key: str, value: object, expected: str) -> None:
    """Raise UserError `key=value: expected ...` unless `holds`. `key` is dotted, from the top."""
    if not holds:
        on_one_line = " ".join(spelled(value).split())
        raise UserError(f"{key}={on_one_line}: expected {expected}")


class Settings:
    """Base of a dataclass of settings: UserError, one line, for a misspelt one in Python, as in a recipe."""

    def __new__(cls, *values: Any, **settings: Any) -> Self:
        taken = signature(cls.__init__).parameters
        if not any(each.kind is each.VAR_KEYWORD for each in taken.values()):
            expect_known(cls, settings.keys() - taken.keys())
        return super().__new__(cls)


def expect_known(kind: Any, settings: Collection[str]) -> None:
    """The dataclass `kind` has all of these settings."""
    known = [entry.name for entry in fields(kind)]
    for name in settings:
        if name not in known:
            hint = did_you_mean(nearest(name, known))
            raise UserError(f"{kind.__name__}: {name}: no such setting; it has {', '.join(known)}{hint}")


def spelled(value: object) -> str:
    """`value` as one writes it in a recipe or behind `key=`."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def expect_choice(key: str, value: str, choices: Collection[str]) -> None:
    """`value` is one of `choices`."""
    hint = did_you_mean(nearest(value, choices))
    expect(value in choices, key, value, f"one of {', '.join(choices)}{hint}")


_KINDS: dict[Any, tuple[type | tuple[type, ...], str]] = {
    int: (int, "a whole number"),
    float: ((int, float), "a number"),
    bool: (bool, "true or false"),
    str: (str, "text"),
    type(None): (type(None), "null"),
}


def expect_types(config: Any, prefix: str = "") -> None:
    """Each value of the dataclass `config` is of its field's type: Python, unlike a recipe, takes any.

    Groups are checked with what is below them; lists and mappings by whoever owns them.
    """
    hints = get_type_hints(type(config))
    for entry in fields(config):
        key, value, hint = f"{prefix}{entry.name}", getattr(config, entry.name), hints[entry.name]
        if is_dataclass(hint):
            name = hint.__name__  # type: ignore[union-attr]
            expect(isinstance(value, hint), key, value, f"a {name}, such as {name}()")  # type: ignore[arg-type]
            expect_types(value, f"{key}.")
        elif all(option in _KINDS for option in _options(hint)):
            is_one = any(_is_a(value, option) for option in _options(hint))
            expect(is_one, key, _as_python(value), described_type(hint))


def described_type(hint: Any) -> str:
    """A field's type for people: `int | None` is "a whole number or null"."""
    if hint is Any:
        return "a value or a list"
    if get_origin(hint) is dict:
        return "keys and values"
    if get_origin(hint) is list:
        element = get_args(hint)[0]
        if element is str:
            return "a list such as [a, b]"
        return f"a list of {{{', '.join(entry.name for entry in fields(element))}}}"
    return " or ".join(_KINDS[option][1] if option in _KINDS else str(option) for option in _options(hint))


def _options(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _as_python(value: object) -> object:
    """A text with its quotes, and a number of NumPy by its type, where that is what is wrong."""
    return value if type(value) in (int, float, bool, type(None)) else repr(value)


def _is_a(value: object, hint: Any) -> bool:
    return isinstance(value, _KINDS[hint][0]) and (hint is bool or not isinstance(value, bool))


def expect_at_least(key: str, value: float | None, least: float) -> None:
    """`value` is None or a finite number from `least` up; a whole one where `least` is an int."""
    if value is None:
        return
    kind = int if isinstance(least, int) else float
    expect(_is_a(value, kind), key, _as_python(value), f"{described_type(kind)}, {least} or more")
    expect(math.isfinite(value) and value >= least, key, value, f"{least} or more")


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


def did_you_mean(hint: str | None) -> str:
    """The end of an error about an unknown name, whose nearest known one is `hint`."""
    return f"; did you mean {hint}?" if hint else ""
