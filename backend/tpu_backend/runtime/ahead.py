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


def promised(description: dict[str, Any]) -> Future[Any] | None:
    """What `begin` was told to compile, once; None where it was not."""
    return _promised.pop(_key(description), None) if _promised else None


def _key(description: dict[str, Any]) -> Hashable:
    return repr(sorted((name, value) for name, value in description.items() if name != "circumstances"))
