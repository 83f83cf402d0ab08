"""Which files of a text are not those that a run began with."""

import json
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

_FILE = "files.json"
_MOST = 10_000
"""Files of which that is kept: each takes a line."""
_NAMED = 3


def record_files(paths: Sequence[Path], directory: Path) -> None:
    """Keep in `directory`, beside what was made of the text, size and time of each of its files."""
    if 0 < len(paths) <= _MOST:
        (directory / _FILE).write_text(json.dumps(_states(paths)))


def changed_files(paths: Sequence[Path], directories: Iterable[Path]) -> str | None:
    """The files that differ from those recorded, a few of them by name.

    `directories`: the first one counts that has a record. None: there is no record, or no difference.
    """
    for directory in directories:
        with suppress(OSError, ValueError):
            before = json.loads((directory / _FILE).read_text())
            return _difference(before, _states(paths))
    return None


def _states(paths: Sequence[Path]) -> dict[str, list[int]]:
    """By path, relative to what all share: a text may have moved."""
    root = Path(os.path.commonpath([path.parent for path in paths]))
    statuses = {path.relative_to(root).as_posix(): path.stat() for path in paths}
    return {name: [status.st_size, status.st_mtime_ns] for name, status in statuses.items()}


def _difference(before: dict[str, list[int]], now: dict[str, list[int]]) -> str | None:
    both = before.keys() & now.keys()
    # Copied files have other times; where sizes tell enough, they do.
    changed = {name for name in both if before[name][0] != now[name][0]}
    gone, new = before.keys() - now.keys(), now.keys() - before.keys()
    if not (changed or gone or new):
        changed = {name for name in both if before[name] != now[name]}
    kinds = ((changed, "changed"), (gone, "gone"), (new, "new"))
    said = [f"{_named(names)} {'is' if len(names) == 1 else 'are'} {kind}" for names, kind in kinds if names]
    return ", ".join(said) or None


def _named(names: set[str]) -> str:
    first, rest = sorted(names)[:_NAMED], len(names) - _NAMED
    return ", ".join(first) + (f" and {rest} more" if rest > 0 else "")
