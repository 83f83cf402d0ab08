"""The files that the user means."""

import glob
import os
from pathlib import Path

from tputrain.config_checks import did_you_mean, nearest
from tputrain.data.config import DataError


def find_files(patterns: str, key: str = "data.files") -> list[Path]:
    """The files that match the comma-separated globs, sorted. Raises DataError for a glob without one."""
    paths: set[Path] = set()
    for pattern in filter(None, (part.strip() for part in patterns.split(","))):
        matches = [Path(match) for match in glob.glob(os.path.expanduser(pattern), recursive=True)]
        files = [match.resolve() for match in matches if match.is_file()]
        if not files:
            found = "no file matches" if not matches else "only directories match"
            meant = None if glob.has_magic(pattern) else nearest_path(pattern)
            hint = f"; all files below: {pattern.rstrip('/')}/**" if matches else did_you_mean(meant)
            raise DataError(f"{key}={patterns!r}: {found} {pattern!r} (looked from {os.getcwd()}){hint}")
        paths.update(files)
    if not paths:
        raise DataError(f"{key}={patterns!r}: expected at least one glob, e.g. {key}='notes/*.txt'")
    return sorted(paths)


def nearest_path(path: str) -> str | None:
    """The existing path that `path` was most likely meant to be: as it, but for the last part."""
    parent, name = os.path.split(os.path.expanduser(path))
    try:
        hint = nearest(name, os.listdir(parent or "."))
    except OSError:
        return None
    return None if hint is None else os.path.join(parent, hint)
