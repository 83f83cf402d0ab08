"""Python's garbage collector, run at fixed steps instead of whenever it likes.

A collection in the middle of a step costs that step many milliseconds, and frees tensors at a moment that
differs from run to run.
"""

import gc
from types import TracebackType

_FROZEN_BY_PYTHON = 1000  # objects, at most, after a collection: 375 in Python 3.12, none in the others


class ScheduledCollection:
    """Context in which garbage is collected only by `after_step`, every `every` steps."""

    def __init__(self, every: int):
        self.every = every
        self._was_enabled = gc.isenabled()
        self._has_settled = False
        self._freezes = False

    def __enter__(self) -> "ScheduledCollection":
        self._was_enabled = gc.isenabled()
        gc.disable()
        return self

    def after_step(self, step: int) -> None:
        """To be called between steps, with the number of steps done."""
        if not self._has_settled:
            self._has_settled = True
            gc.collect()
            # What the first step built (programs, caches, optimizer state) stays: never look at it again. But
            # thawing knows no parts: where the caller has frozen something, ours cannot join it.
            self._freezes = gc.get_freeze_count() < _FROZEN_BY_PYTHON
            if self._freezes:
                gc.freeze()
        elif step % self.every == 0:
            gc.collect()

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._freezes:
            gc.unfreeze()
        if self._was_enabled:
            gc.enable()
