"""PyTorch's settings that lowerings read, as they were when an op was recorded.

An op may be lowered long after it was recorded: the recorder keeps the setting beside each op that reads it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tpu_backend import _C

_PRECISIONS = ("highest", "high", "medium")  # by at::Float32MatmulPrecision


@dataclass
class RecordedSettings:
    """Those of one op; ``was_read`` tells whether its lowering asks for any."""

    precision: int | None = None  # None: PyTorch's setting now
    was_read: bool = False


class _Current(threading.local):
    settings: RecordedSettings | None = None


_current = _Current()


@contextmanager
def recorded_settings(precision: int | None = None) -> Iterator[RecordedSettings]:
    """Let lowerings on this thread read what was recorded."""
    outer, _current.settings = _current.settings, RecordedSettings(precision)
    try:
        yield _current.settings
    finally:
        _current.settings = outer


def float32_matmul_precision() -> str:
    """What ``torch.set_float32_matmul_precision`` was last given before the op was recorded, or what
    ``torch.backends.*.fp32_precision`` come to.
    """
    settings = _current.settings
    precision = None if settings is None else settings.precision
    if settings is not None:
        settings.was_read = True
    return _PRECISIONS[_C.matmul_precision() if precision is None else precision]
