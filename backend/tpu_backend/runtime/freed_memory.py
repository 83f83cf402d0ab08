"""What the compiler has freed goes back to the system: glibc would keep it, hundreds of MB after a step.

Only when no thread compiles any more: another one would ask for it again.
"""

from __future__ import annotations

import ctypes
import threading
import time


class _GivingBack:
    """Around each compilation. The last one that ends gives back, if together they took long."""

    _LONG = 1.0  # seconds

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_compiling = 0
        self._seconds = 0.0  # of compilations, since it gave back
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)

    def __enter__(self) -> None:
        with self._lock:
            self._num_compiling += 1
            self._seconds -= time.perf_counter()

    def __exit__(self, *raised: object) -> None:
        with self._lock:
            self._num_compiling -= 1
            self._seconds += time.perf_counter()
            if self._num_compiling or self._seconds < self._LONG:
                return
            self._seconds = 0.0
        if self._trim is not None:
            self._trim(0)


giving_back_freed_memory = _GivingBack()
