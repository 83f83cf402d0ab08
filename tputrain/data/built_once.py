"""What takes long to make is made by one of the processes that want it; the others wait for that."""

import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import IO

from tputrain.data.config import DataError


def built_once(
    path: Path,
    what: str,
    announce: Callable[[str], None],
    cache_dir: str,
    build: Callable[[Path], None],
    is_there: Callable[[Path], bool] = Path.exists,
) -> None:
    """Make the file or directory `path`, unless it is there. `build` writes to the path that it gets; it
    is then moved to `path`.

    Of the processes that do this at the same time one builds; the others wait for it. It is put in place as a
    whole. Raises DataError, which names `cache_dir`, where it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path, what, announce):
            if not is_there(path):
                with tempfile.TemporaryDirectory(prefix="building-", dir=path.parent) as workspace:
                    built = Path(workspace) / path.name
                    build(built)
                    _publish(built, path)
    except OSError as error:
        raise DataError(
            f"data.cache_dir={cache_dir}: cannot write there ({error.strerror}): name another directory"
        ) from error


def _publish(built: Path, path: Path) -> None:
    for each in built.iterdir() if built.is_dir() else [built]:
        with each.open("rb") as file:
            os.fsync(file.fileno())
    try:
        built.rename(path)
    except OSError:
        if not path.exists():  # else another process was first, with the same content
            raise


@contextmanager
def _locked(path: Path, what: str, announce: Callable[[str], None]) -> Iterator[None]:
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
