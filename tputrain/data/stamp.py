"""Whether the files behind a corpus are those of before, told without reading them."""

import json
import time
from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path

from tputrain.data.config import DataConfig
from tputrain.data.files import find_files
from tputrain.data.rows import open_rows

_SETTLED = 2.0
"""Seconds since the last change of a file: it may change again within one tick of the file system's clock."""


def stamp_of(paths: Iterable[Path], choices: object = None) -> str | None:
    """Of paths, sizes and times of these files, and of `choices` (JSON) on how they are read.

    None where a file has changed just now.
    """
    found, newest = [], 0
    for path in paths:
        status = path.stat()
        found.append((str(path), status.st_size, status.st_mtime_ns))
        newest = max(newest, status.st_mtime_ns)
    if newest / 1e9 > time.time() - _SETTLED:
        return None
    return _hash([found, choices])


def stamp_of_rows(cfg: DataConfig) -> str | None:
    """Of what is behind the rows of `cfg`, and of the columns that are read."""
    columns = [cfg.text_column, cfg.messages_column, cfg.prompt_column, cfg.answer_column]
    choices = [cfg.source, cfg.format, *columns, cfg.subset, cfg.split, cfg.validation_split]
    if cfg.name is None:
        return stamp_of(files_of(cfg), [*choices, len(_held_out_files(cfg))])
    if Path(cfg.name).expanduser().is_dir():
        return stamp_of(files_of(cfg), choices)
    parts = [False, True] if cfg.validation_is_given else [False]
    return _hash([[open_rows(cfg, held_out)._fingerprint for held_out in parts], choices])


def files_of(cfg: DataConfig) -> list[Path]:
    """The user's files behind the text of `cfg`; none where it is not the user's."""
    if cfg.name is not None:
        return sorted(path for path in Path(cfg.name).expanduser().rglob("*") if path.is_file())
    return [] if cfg.files is None else [*find_files(cfg.files), *_held_out_files(cfg)]


def _held_out_files(cfg: DataConfig) -> list[Path]:
    return find_files(cfg.validation_files, "data.validation_files") if cfg.validation_files else []


def _hash(what: object) -> str:
    return blake2b(json.dumps(what).encode(), digest_size=16).hexdigest()
