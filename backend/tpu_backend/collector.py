"""Python's garbage collector while modules are imported."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing() -> Iterator[None]:
    """Collect no garbage in here, and take what was made for old afterwards.

    The collector would look through all modules several times while JAX is imported, and once more soon
    after, which takes a sixth of a second each time. What is old is looked at when much has been added to it.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if gc.get_freeze_count() == 0:  # else what somebody has frozen would thaw
            gc.freeze()
            gc.unfreeze()  # into the oldest generation
        if was_on:
            gc.enable()
