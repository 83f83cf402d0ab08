"""A directory as a bucket that is mounted: a file is what its last writer had of it, and no more."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest


@contextmanager
def mounted_bucket(directory: Path) -> Iterator[list[str]]:
    """While the context lasts, who opens a file of `directory` to write into what is there (`os.open`) has a
    copy of it, which takes the file's place when it is closed. Gives the names of files that were written so.
    """
    opened: dict[int, Path] = {}
    written: list[str] = []
    really_open, really_close = os.open, os.close

    def open_(path: Any, flags: int, *arguments: Any, **options: Any) -> int:
        if flags != os.O_WRONLY or directory not in Path(path).parents:
            return really_open(path, flags, *arguments, **options)
        descriptor, copy = tempfile.mkstemp()
        Path(copy).unlink()
        os.write(descriptor, Path(path).read_bytes())
        opened[descriptor] = Path(path)
        return descriptor

    def close(descriptor: int) -> None:
        if (path := opened.pop(descriptor, None)) is not None:
            whole = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
            new, name = tempfile.mkstemp(dir=path.parent, prefix=".unfinished-")
            os.write(new, whole)
            really_close(new)
            os.rename(name, path)
            written.append(path.name)
        really_close(descriptor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "open", open_)
        patch.setattr(os, "close", close)
        yield written
