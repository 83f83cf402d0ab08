"""Families of configurations, of which one kind is chosen by name: `OptimConfig(name="sgd", momentum=0.9)`.

A family is a frozen dataclass with the settings that all its kinds have. A kind is a subclass with its own.
"""

from collections.abc import Collection
from dataclasses import fields
from typing import Any, ClassVar, Self

from tputrain.config_checks import expect_choice, expect_known, spelled
from tputrain.errors import UserError


class Family:
    """Base of a family: `class OptimConfig(Family, group="optim", by="name")`, whose field `by` names the
    kind, and of its kinds: `class SgdConfig(OptimConfig, names=("sgd",))`.

    Calling the family makes the kind that is named, or that the default of `by` names. Raises UserError, one
    line, for an unknown name, and for a setting that only other kinds have.
    """

    group: ClassVar[str]
    """The key of the family in a recipe."""
    by: ClassVar[str]
    """The field that names the kind."""
    kinds: ClassVar[dict[str, type["Family"]]]
    """Every kind of the family by name."""

    def __init_subclass__(cls, group: str = "", by: str = "", names: Collection[str] = ()) -> None:
        super().__init_subclass__()
        if group:
            cls.group, cls.by, cls.kinds = group, by, {}
        for name in names:
            cls.kinds[name] = cls

    def __new__(cls, *arguments: Any, **settings: Any) -> Self:
        by = cls.by
        named = arguments[0] if arguments else settings.get(by, getattr(cls, by))
        kind = cls.kind_of(named)
        if not issubclass(kind, cls) or (cls in cls.kinds.values() and kind is not cls):
            raise UserError(f"{cls.group}.{by}={spelled(named)}: expected another class than {cls.__name__}")
        for key, value in settings.items():
            if key not in keys_of(kind) and (owners := cls.owners(key)):
                raise foreign(f"{cls.group}.{key}", spelled(value), f"{cls.group}.{by}={named}", owners)
        expect_known(kind, settings)
        return super().__new__(kind)  # a kind of this family

    @classmethod
    def kind_of(cls, name: Any) -> type["Family"]:
        """The kind of that name. Raises UserError where there is none."""
        expect_choice(f"{cls.group}.{cls.by}", name if isinstance(name, str) else spelled(name), cls.kinds)
        return cls.kinds[name]

    @classmethod
    def owners(cls, key: str) -> list[str]:
        """The names of the kinds that have the setting `key`."""
        return [name for name, kind in cls.kinds.items() if key in keys_of(kind)]


def keys_of(kind: type) -> list[str]:
    """The settings of a dataclass."""
    return [entry.name for entry in fields(kind)]


def foreign(key: str, value: str, chosen: str, owners: list[str]) -> UserError:
    """What is said of a setting that only other kinds have. `chosen` says which kind is chosen."""
    return UserError(f"{key}={value}: expected nothing with {chosen}; it is a setting of {', '.join(owners)}")
