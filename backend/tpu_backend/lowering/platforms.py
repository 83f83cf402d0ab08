"""Which XLA platform lowerings are for: a lowering may have a kernel of its own for one."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

PLATFORMS = ("tpu", "cuda", "cpu")


class _Current(threading.local):
    platform: str | None = None


_current = _Current()


def lowered_for() -> str | None:
    """The platform that this thread lowers for; None outside of `lowering_for`."""
    return _current.platform


@contextmanager
def lowering_for(platform: str) -> Iterator[None]:
    """In here lowerings on this thread are for this platform."""
    outer, _current.platform = _current.platform, platform
    try:
        yield
    finally:
        _current.platform = outer
