"""Programs that threads compile before they are asked for, in layered mode: the parts of a step all at once,
and then what fused mode will run.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

_promised: dict[Hashable, Future[Any]] = {}
_threads: ThreadPoolExecutor | None = None


def begin(description: dict[str, Any], compile_now: Callable[[dict[str, Any]], Any]) -> None:
    """Have a thread compile the program of a segment; they take them in this order. The interpreter waits for
    them when it exits: XLA cannot be left while it works.
    """
    global _threads
    if _threads is None:
        _threads = ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="compile ahead")
    key = _key(description)
    if key not in _promised:
        _promised[key] = _threads.submit(compile_now, description)


def result(description: dict[str, Any]) -> Any:
    """What `begin` was told to compile, waited for; None where it was not. It is given out once."""
    key = _key(description)
    if (future := _promised.get(key)) is None:
        return None
    try:
        return future.result()
    finally:
        if future.done():  # else the wait was interrupted, and somebody may ask again
            del _promised[key]


def _key(description: dict[str, Any]) -> Hashable:
    """All that decides the program: not where slices start that are its inputs."""
    starts = zip(description["offsets"], description["offset_is_input"], strict=True)
    decisive = description | {
        "offsets": [None if is_input else start for start, is_input in starts],
        "circumstances": None,
    }
    return repr(sorted(decisive.items()))
