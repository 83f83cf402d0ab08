"""What two configurations, as nested dicts, do not have in common."""

from typing import Any


def differences(old: Any, new: Any, prefix: str = "") -> dict[str, tuple[Any, Any]]:
    """Dotted keys whose values differ between two nested dicts: key to (old, new)."""
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return {} if old == new else {prefix: (old, new)}
    found: dict[str, tuple[Any, Any]] = {}
    for key in [*old, *(key for key in new if key not in old)]:
        found |= differences(old.get(key), new.get(key), f"{prefix}.{key}" if prefix else key)
    return found
