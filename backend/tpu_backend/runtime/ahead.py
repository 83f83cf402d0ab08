"""Programs that a thread compiles before they are asked for (layered mode: what fused mode will run)."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

_promised: dict[Hashable, Future[Any]] = {}
_thread: ThreadPoolExecutor | None = None


def begin(description: dict[str, Any], compile_now: Callable[[dict[str, Any]], Any]) -> None:
    """Have the thread compile the program of a segment. The interpreter waits for it when it exits: XLA
    cannot be left while it works.
    """
    global _thread
    if _thread is None:
        _thread = ThreadPoolExecutor(1, thread_name_prefix="compile ahead")
    _promised.setdefault(_key(description), _thread.submit(compile_now, description))


def promised(description: dict[str, Any]) -> Future[Any] | None:
    """What `begin` was told to compile, once; None where it was not."""
    return _promised.pop(_key(description), None) if _promised else None


def _key(description: dict[str, Any]) -> Hashable:
    return repr(sorted((name, value) for name, value in description.items() if name != "circumstances"))
