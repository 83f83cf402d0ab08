"""JSON from which the same values are read back: also NaN, infinities, and keys that are no text.

JSON itself has neither. A float that is not finite is written as `{"$float": "nan"}`, a dict with other keys
than text as `{"$pairs": [[key, value], ...]}`; everything else is plain JSON. Tuples come back as lists.
"""

import json
import math
from typing import Any

_FLOAT, _PAIRS = "$float", "$pairs"


def dumps(value: Any, indent: int | None = None) -> str:
    """The text. Raises TypeError where something is neither a number, text, None, a list nor a dict."""
    return json.dumps(_marked(value), indent=indent, allow_nan=False)


def loads(text: str) -> Any:
    """The value that `dumps` was given. Raises ValueError or TypeError where it wrote no such text."""
    return _unmarked(json.loads(text))


def _marked(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return {_FLOAT: float.__repr__(value)}
    if isinstance(value, list | tuple):
        return [_marked(each) for each in value]
    if not isinstance(value, dict):
        return value
    if all(isinstance(key, str) for key in value) and not _is_mark(value):
        return {key: _marked(each) for key, each in value.items()}
    for key in value:
        if not isinstance(key, str | int | float | None):
            raise TypeError(f"a key of type {type(key).__name__} is not JSON serializable")
    return {_PAIRS: [[_marked(key), _marked(each)] for key, each in value.items()]}


def _unmarked(value: Any) -> Any:
    if isinstance(value, list):
        return [_unmarked(each) for each in value]
    if not isinstance(value, dict):
        return value
    if not _is_mark(value):
        return {key: _unmarked(each) for key, each in value.items()}
    if _FLOAT in value:
        return float(value[_FLOAT])
    return {_unmarked(key): _unmarked(each) for key, each in value[_PAIRS]}


def _is_mark(value: dict[Any, Any]) -> bool:
    return len(value) == 1 and (_FLOAT in value or _PAIRS in value)
