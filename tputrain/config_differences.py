"""What two configurations, as nested dicts, do not have in common."""

from dataclasses import asdict
from typing import Any


def changed_settings(saved: dict[str, Any], cfg: Any) -> dict[str, tuple[Any, Any]]:
    """What the dataclass `cfg` says otherwise than `saved`, a checkpoint's: dotted key to (old, new).

    A key that did not exist when it was saved has its default; one that `cfg` does not know is left out.
    """
    known = asdict(cfg)
    old = _over(asdict(type(cfg)()), {key: value for key, value in saved.items() if key in known})
    return differences(old, known)


def _over(defaults: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    merged = defaults | values
    for key, default in defaults.items():
        if isinstance(default, dict) and isinstance(values.get(key), dict):
            merged[key] = _over(default, values[key])
    return merged


def differences(old: Any, new: Any, prefix: str = "") -> dict[str, tuple[Any, Any]]:
    """Dotted keys whose values differ between two nested dicts: key to (old, new)."""
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return {} if old == new else {prefix: (old, new)}
    found: dict[str, tuple[Any, Any]] = {}
    for key in [*old, *(key for key in new if key not in old)]:
        found |= differences(old.get(key), new.get(key), f"{prefix}.{key}" if prefix else key)
    return found
