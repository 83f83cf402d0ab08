"""The keys that a recipe may have, and which one a wrong one was meant to be. Imports no PyTorch.

The configurations tell their keys once they are imported, which takes seconds. `known_keys.txt` lists them,
so that a wrong one is answered at once. `tests/tputrain/test_recipe.py` holds the two together and writes the
list.
"""

import sys
from collections.abc import Collection, Iterable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from tputrain.config_checks import nearest
from tputrain.errors import UserError
from tputrain.recipe_layers import layers_of_file, leaves, override_layer, shown

ANY_BELOW = ".*"
"""Ends a line of the list whose key holds keys that somebody else has to know."""


def check_keys(overrides: Sequence[str], recipe: Path | None = None) -> None:
    """Raise UserError, one line, at the first key of `recipe` or of `overrides` that there is not.

    Where PyTorch is loaded nothing is answered early: a script may have kinds of its own, which have keys.
    """
    if "torch" in sys.modules:
        return
    lines = (files("tputrain") / "known_keys.txt").read_text(encoding="utf-8").split()
    known = [line.removesuffix(ANY_BELOW) for line in lines]
    open_groups = tuple(f"{line.removesuffix(ANY_BELOW)}." for line in lines if line.endswith(ANY_BELOW))
    given = [] if recipe is None else [(layer, leaves(layer.values)) for layer in layers_of_file(recipe)]
    for text in overrides:
        layer, key = override_layer(text, {}), text.partition("=")[0]
        # Whether a known key's value is text or keys and values is not known here: sample.prompt='{a: 1}'.
        given.append((layer, iter([] if key in known else leaves(layer.values))))
    for layer, pairs in given:
        for key, value in pairs:
            if key not in known and not key.startswith(open_groups):
                raise unknown_key(layer.source, key, value, known)


def unknown_key(source: str, key: str, value: Any, known: Collection[str]) -> UserError:
    """What is said of a key that there is not. `known`: those there are."""
    hint = _nearest_key(key, known)
    return UserError(f"{source}: {key}={shown(value)}: unknown key; nearest known key: {hint}")


def _nearest_key(key: str, known: Collection[str]) -> str:
    """What `key` was most likely meant to be; one of the group that it names goes before one of another."""
    group, _, name = key.rpartition(".")
    if not any(candidate.startswith(f"{group}.") for candidate in known):
        group = ""  # there is no such group
    prefix = f"{group}." if group else ""
    below = [candidate for candidate in known if candidate.startswith(prefix)]
    found = _same(name, below) or _same(name, known) or _alike(name, below)
    if found is None and not group:
        found = nearest(key, known)
    if found is not None:
        return found
    children = dict.fromkeys(candidate[len(prefix) :].partition(".")[0] for candidate in below)
    return f"none resembles it (known {f'below {group}' if group else 'keys'}: {', '.join(children)})"


def _same(name: str, keys: Iterable[str]) -> str | None:
    """The keys whose last part is `name`, or is abbreviated by it: `lr` is `learning_rate`."""
    parts = {key: key.rpartition(".")[2] for key in keys}
    matches = [
        key for key, part in parts.items() if name == part or ("_" in part and name == _initials(part))
    ]
    return " or ".join(matches) or None


def _initials(name: str) -> str:
    return "".join(word[:1] for word in name.split("_"))


def _alike(name: str, keys: Iterable[str]) -> str | None:
    by_part = {key.rpartition(".")[2]: key for key in keys}
    hint = nearest(name, by_part)
    return None if hint is None else by_part[hint]
