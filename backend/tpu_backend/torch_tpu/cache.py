"""Where compiled programs are kept for later processes."""

from __future__ import annotations

import os
from pathlib import Path

from tpu_backend import executable_cache


def set_executable_cache(
    directory: str | os.PathLike[str] | None, *, max_bytes: int = executable_cache.MAX_BYTES
) -> None:
    """Keep compiled programs in a directory, where later processes find them. None keeps them nowhere.

    It holds for programs that are needed from now on. The environment variable ``TPU_CACHE_DIR`` says what a
    process starts with: a directory, or ``none``. The default is ``~/.cache/tputrain/executables``. Above
    `max_bytes`, the programs used least recently are deleted first. Many processes and hosts may share one
    directory.

    If the directory cannot be written, or other users could have written to it, one line on standard error
    says so, and programs are compiled as if there were no directory. Raises ValueError for `max_bytes`
    below 1.
    """
    executable_cache.use(None if directory is None else Path(directory), max_bytes)


def get_executable_cache() -> Path | None:
    """The directory of `set_executable_cache` as an absolute path, or None."""
    chosen = executable_cache.current()
    return None if chosen is None else chosen.directory


executable_cache.use_environment()
