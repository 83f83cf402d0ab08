"""Keys that tell apart what Python takes for equal.

2, 2.0 and True are one key of a dictionary, and so are 0.0 and -0.0; a NaN is a key that is not found again.
"""

from __future__ import annotations

import struct
from collections.abc import Hashable
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np


def exact_key(value: Any) -> Hashable:
    """A key that is equal for two values only where they are of one type and, if numbers, of the same bits.

    Looks into tuples, frozen sets, slices and dataclasses; anything else is compared by its own ``==``.
    """
    kind = type(value)
    if kind in (int, bool, str, type(None)):  # most are
        return kind, value
    if isinstance(value, float):
        return kind, struct.pack("<d", value)
    if isinstance(value, complex):
        return kind, struct.pack("<dd", value.real, value.imag)
    if isinstance(value, np.generic):
        return kind, value.dtype.str, value.tobytes()
    if isinstance(value, tuple):
        return kind, tuple(exact_key(each) for each in value)
    if isinstance(value, frozenset):
        return kind, frozenset(exact_key(each) for each in value)
    if isinstance(value, slice):
        return kind, exact_key((value.start, value.stop, value.step))
    if is_dataclass(value) and not isinstance(value, type):
        compared = (getattr(value, field.name) for field in fields(value) if field.compare)
        return kind, value, tuple(exact_key(each) for each in compared)
    return kind, value
