"""Python's garbage collector while modules are imported."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_FROZEN_BY_PYTHON = 1000  # objects, at most, when a process begins: 375 in Python 3.12, none in the others


@contextmanager
def importing() -> Iterator[None]:
    """Collect garbage once, after what is in here, and never look at what stays again.

    The collector would look through all modules several times while JAX is imported, a sixth of a second each
    time, and once more in the first step. Where somebody has frozen objects, nothing is frozen here: whoever
    did will unfreeze, and knows no parts.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            if gc.get_freeze_count() < _FROZEN_BY_PYTHON:
                gc.collect()  # what is garbage now must not be frozen
                gc.freeze()
            gc.enable()
