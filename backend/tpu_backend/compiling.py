"""That something is being compiled right now: for whoever waits, and for who watches over the waiting."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

_PATIENCE = 15.0  # seconds of silence

_threads: list[int] = []  # an entry a compilation under way; a list's append and remove are atomic


def is_compiling() -> bool:
    """Whether some thread of this process is compiling a program; takes no lock and asks no device."""
    return bool(_threads)


@contextmanager
def compiling(num_ops: int, advice: str = "", what: str = "a program") -> Iterator[None]:
    """In here `what`, of `num_ops` operations, is compiled: one line on standard error when that takes long,
    with what would take less, and another when it is done.
    """
    thread, start = threading.get_ident(), time.perf_counter()

    def tell() -> None:
        print(
            f"tpu: still compiling {what} of {num_ops:,} operations{advice and f' ({advice})'}",
            file=sys.stderr,
            flush=True,
        )

    timer = threading.Timer(_PATIENCE, tell)
    timer.daemon = True
    timer.start()
    _threads.append(thread)
    try:
        yield
    finally:
        _threads.remove(thread)
        timer.cancel()
        if (took := time.perf_counter() - start) > _PATIENCE:
            print(f"tpu: compiled in {took:.0f} s", file=sys.stderr, flush=True)
