"""What takes long to make is made by one of the processes that want it; the others wait for that."""

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import IO


@contextmanager
def built_once(path: Path, what: str, announce: Callable[[str], None]) -> Iterator[None]:
    """In here no other process makes what is to be at `path`; look again whether it is there now.

    The lock is a file beside `path`, which is removed at the end. Its owner's end frees it. Where the file
    system has no locks, processes do not wait for each other: what they make must be put in place as a whole.
    """
    name = path.with_name(f"{path.name}.lock")
    while True:
        with name.open("a") as lock:
            _acquire(lock, what, announce)
            if not _is_at(lock, name):  # its last owner has removed it, and another may hold a new one
                continue
            try:
                yield
            finally:
                name.unlink(missing_ok=True)
            return


def _acquire(lock: IO[str], what: str, announce: Callable[[str], None]) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        announce(f"{what}: another process makes it ...")
        began = perf_counter()
        fcntl.flock(lock, fcntl.LOCK_EX)
        announce(f"{what}: another process makes it ... {perf_counter() - began:.1f} s")
    except OSError:
        pass


def _is_at(lock: IO[str], name: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(lock.fileno()), name.stat())
    except FileNotFoundError:
        return False
