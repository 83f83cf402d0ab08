"""What two configurations do not have in common."""

from dataclasses import MISSING, Field, asdict, fields, is_dataclass
from typing import Any

from tputrain.kinds import Family


def changed_settings(saved: dict[str, Any], cfg: Any, prefix: str = "") -> dict[str, tuple[Any, Any]]:
    """What the dataclass `cfg` says otherwise than `saved`, a checkpoint's: dotted key to (old, new).

    A key that did not exist when it was saved has its default; one that `cfg` does not know is left out.
    """
    found: dict[str, tuple[Any, Any]] = {}
    plain = asdict(cfg)
    for entry in fields(cfg):
        key, now, new = f"{prefix}{entry.name}", getattr(cfg, entry.name), plain[entry.name]
        if is_dataclass(now):
            found |= changed_settings(saved.get(entry.name) or {}, now, f"{key}.")
            continue
        old = saved[entry.name] if entry.name in saved else _default(cfg, entry)
        if old != new:
            found[key] = (old, new)
    return found


def _default(cfg: Any, entry: Field) -> Any:
    if isinstance(cfg, Family) and entry.name == cfg.by:
        return getattr(next(base for base in type(cfg).__mro__ if Family in base.__bases__), entry.name)
    if entry.default_factory is not MISSING:
        return entry.default_factory()
    return entry.default
