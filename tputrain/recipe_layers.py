"""What a recipe consists of: its YAML, the pieces that it includes, overrides. Imports no PyTorch.

Every mistake is one line: which file, which key, which value, what was expected.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from tputrain.config_checks import did_you_mean, nearest, spelled
from tputrain.errors import UserError, first_line
from tputrain.shipped import shipped_names, shipped_path

COMMAND_LINE = "command line"
_INCLUDE = "include"
_KEY = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


@dataclass(frozen=True)
class Layer:
    """Values from one source; later layers win over earlier ones."""

    source: str
    values: dict[str, Any]
    is_stored: bool = False
    """Whether a run wrote it: before kinds had settings of their own, it wrote those of all."""


def layers_of_file(path: Path) -> list[Layer]:
    """The pieces that the recipe at `path` includes, and on top its own values."""
    values = _read_yaml(path)
    includes = values.pop(_INCLUDE, None) or []
    if not (isinstance(includes, list) and all(isinstance(name, str) for name in includes)):
        raise UserError(f"{path}: {_INCLUDE}={includes!r}: expected a list of names such as [model/llama-5m]")
    return [*(_include_layer(name, path) for name in includes), Layer(str(path), values)]


def _include_layer(name: str, recipe: Path) -> Layer:
    beside = recipe.parent / f"{name}.yaml"
    path = beside if beside.is_file() else shipped_path("configs", name)
    if path is None:
        known = shipped_names("configs")
        hint = did_you_mean(nearest(name, known))
        raise UserError(
            f"{recipe}: {_INCLUDE}={name}: no {beside} and no shipped config "
            f"(there are: {', '.join(known)}){hint}"
        )
    values = _read_yaml(path)
    if _INCLUDE in values:
        raise UserError(f"{path}: {_INCLUDE}: only a recipe can include, not a piece that it includes")
    return Layer(str(path), values)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        loaded = OmegaConf.load(path)
        values = OmegaConf.to_container(loaded, resolve=False)
    except yaml.YAMLError as error:
        raise UserError(f"{path}: {_describe_yaml_error(error, path)}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text (byte {error.start})") from None
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from None
    except (OmegaConfBaseException, ValueError, RecursionError) as error:
        raise UserError(f"{path}: {first_line(error)}") from None
    if not isinstance(values, dict):
        raise UserError(f"{path}: expected keys and values, found a {type(values).__name__}")
    if not values and not path.read_text(encoding="utf-8").split():
        raise UserError(
            f"{path}: empty; expected keys and values (`tputrain cp llama` gives a recipe to edit)"
        )
    return _spelled_out(values)  # type: ignore[arg-type]


def _spelled_out(values: dict[str, Any]) -> dict[str, Any]:
    """With `parallel: auto` as the key that it is short for."""
    return values | {"parallel": {"auto": True}} if values.get("parallel") == "auto" else values


def override_layer(text: str, hints: Mapping[str, Any]) -> Layer:
    """The override `text` (`key=value`). `hints`: the types of keys that are known."""
    key, equals, value = text.partition("=")
    if not equals or not _KEY.fullmatch(key):
        raise UserError(f"{COMMAND_LINE}: {text!r}: expected key=value, such as trainer.steps=1000")
    values: Any = _parse_value(value, hints.get(key))
    for part in reversed(key.split(".")):
        values = {part: values}
    return Layer(COMMAND_LINE, _spelled_out(values))


def _parse_value(text: str, hint: Any) -> Any:
    """What `text` stands for, for a key of type `hint`: YAML, but text as it is where the key holds text."""
    try:
        layer = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]), resolve=False)
    except (yaml.YAMLError, OmegaConfBaseException, ValueError):
        return text  # no YAML, such as *.txt
    parsed = layer["value"]  # type: ignore[call-overload, index]
    is_quoted = text[:1] in ("'", '"') and isinstance(parsed, str)
    is_text_alone = get_origin(hint) not in (list, dict) and int not in get_args(hint)
    is_for_text = hint is str or (is_text_alone and str in get_args(hint))
    return text if is_for_text and parsed is not None and not is_quoted else parsed


def leaves(values: dict[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every dotted key with its value."""
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and value:
            yield from leaves(value, key + ".")
        else:
            yield key, value


def _describe_yaml_error(error: yaml.YAMLError, path: Path) -> str:
    mark = getattr(error, "problem_mark", None)
    where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
    problem = getattr(error, "problem", None) or first_line(error)
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    if mark and lines[mark.line : mark.line + 1] and lines[mark.line][mark.column :].startswith("\t"):
        problem = "a tab; indent with spaces"
    return f"{where}not valid YAML: {problem}"


def shown(value: Any) -> str:
    """A value as an error shows it."""
    text = spelled(value) if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
