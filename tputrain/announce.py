"""Lines for the person who waits: what starts now, and how long it took."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


def say(line: str) -> None:
    """Print one line at once, also where standard output is a pipe."""
    print(line, flush=True)


@contextmanager
def announced(what: str) -> Iterator[None]:
    """`what ...` before, and its duration after, so that a silence always says what it is."""
    print(f"{what} ...", end=" ", flush=True)
    started = time.perf_counter()
    try:
        yield
    except BaseException:
        say("not finished")
        raise
    say(f"{time.perf_counter() - started:.1f} s")
