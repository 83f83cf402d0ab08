"""That something is being compiled right now: for whoever waits, and for who watches over the waiting."""

from __future__ import annotations

import _thread
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

_PATIENCE = 15.0  # seconds of compilation without a word, of one program or of several
_SHORTEST = 2.0  # seconds: nothing shorter is told
_INTERVAL = 60.0  # seconds between news, after the first

_LONG_AGO = 60.0  # seconds after which compilations belong to nothing that somebody waits for

_untold = 0.0  # seconds of compilations that ended since the last word
_ended_at = 0.0  # the last of them

_threads: list[int] = []  # an entry a compilation under way; a list's append and remove are atomic


def is_compiling() -> bool:
    """Whether some thread of this process is compiling a program; takes no lock and asks no device."""
    return bool(_threads)


@contextmanager
def compiling(
    num_ops: int, described: Callable[[], str] = lambda: "", what: str = "a program"
) -> Iterator[None]:
    """In here `what`, of `num_ops` operations, is compiled: a line on standard error when that takes long,
    alone or after others, another each minute, and one when it is done. `described` says which operations,
    and what would take less; it is asked at the first line, in a thread of its own.
    """
    global _untold, _ended_at
    thread, start, is_told = threading.get_ident(), time.perf_counter(), False
    before = _untold if start - _ended_at < _LONG_AGO else 0.0
    # A lock of C: while it is held no Python runs in which a finalizer could wait for this compilation.
    under_way = _thread.allocate_lock()
    under_way.acquire()

    def tell() -> None:
        nonlocal is_told
        global _untold
        pause = max(_PATIENCE - before, min(_SHORTEST, _PATIENCE))
        so_far, text = f", after {before:.0f} s of others" if before >= 1 else "", None
        while not under_way.acquire(timeout=pause):
            is_told, _untold = True, 0.0
            text = described() if text is None else text
            print(
                f"tpu: still compiling {what} of {num_ops:,} operations, "
                f"for {time.perf_counter() - start:.0f} s{so_far}{text and f': {text}'}",
                file=sys.stderr,
                flush=True,
            )
            pause, so_far = _INTERVAL, ""

    with suppress(RuntimeError):  # Python 3.12 starts no thread while it ends: then there is no news
        _thread.start_new_thread(tell, ())
    _threads.append(thread)
    try:
        yield
    finally:
        _threads.remove(thread)
        under_way.release()
        took = time.perf_counter() - start
        if is_told:
            print(f"tpu: compiled in {took:.0f} s", file=sys.stderr, flush=True)
        elif thread not in _threads:
            _untold, _ended_at = before + took, start + took
