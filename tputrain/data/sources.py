"""Where text comes from: the standard library's source by default, the user's files, a dataset's rows."""

import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from itertools import chain
from pathlib import Path
from platform import python_version
from typing import Any

from tputrain.data.config import DataConfig, DataError
from tputrain.data.corpus import Corpus, Document
from tputrain.data.docstrings import docstring_conversations
from tputrain.data.files import find_files
from tputrain.data.rows import empty, open_rows, read_documents
from tputrain.data.stamp import stamp_of, stamp_of_rows

# Tests are repetitive and site-packages differs from machine to machine; neither belongs in a default corpus.
_SKIPPED_DIRECTORIES = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
# Written by each build of the interpreter, full of that machine's paths.
_SKIPPED_PREFIX = "_sysconfigdata"
_SMALLEST_STANDARD_LIBRARY = 6_000_000  # bytes


def read_corpus(cfg: DataConfig) -> Corpus:
    """The text that `cfg` names, read when it is looked at. Raises DataError where there is none."""
    if cfg.source == "docstrings":
        return docstrings(cfg)
    if cfg.is_rows:
        return rows(cfg)
    if cfg.files is None:
        return standard_library(Path(sysconfig.get_path("stdlib")))
    return text_files(cfg.files)


def standard_library(root: Path) -> Corpus:
    """The Python source below `root`, without tests and installed packages."""
    paths = list(_python_source(root))
    size = sum(path.stat().st_size for path in paths)
    if size < _SMALLEST_STANDARD_LIBRARY:
        raise DataError(
            f"the standard library in {root} holds {size / 1e6:.1f} MB of Python source, "
            f"at least {_SMALLEST_STANDARD_LIBRARY / 1e6:.0f} MB are needed: set data.files, for instance "
            "data.files='notes/*.txt'"
        )
    title = f"Python {python_version()} standard library"
    return Corpus(title, _Files(paths, root, "replace"), stamp=stamp_of(paths))


def docstrings(cfg: DataConfig) -> Corpus:
    """Questions about the standard library, answered by its docstrings; a conversation is one document."""
    source = standard_library(Path(sysconfig.get_path("stdlib")))
    made = docstring_conversations(
        ((document.path, document.text) for document in source.documents),
        source.survey.totals.digest,
        cfg.cache_dir,
    )
    return Corpus(f"questions about the {source.title}", [*map(row_document, made)], unit="question")


def _python_source(root: Path) -> Iterator[Path]:
    for directory, subdirectories, names in os.walk(root):
        subdirectories[:] = sorted(set(subdirectories) - _SKIPPED_DIRECTORIES)
        for name in sorted(names):
            path = Path(directory, name)
            if path.suffix == ".py" and not name.startswith(_SKIPPED_PREFIX) and path.is_file():
                yield path


def text_files(patterns: str) -> Corpus:
    """The non-empty UTF-8 files that match the comma-separated globs; one file is one document."""
    paths = find_files(patterns)
    # Paths relative to what the files share, so that the split into train and validation survives a move.
    root = Path(os.path.commonpath([path.parent for path in paths]))
    if not any(path.stat().st_size for path in paths):
        raise DataError(f"data.files={patterns!r}: all files that match are empty ({len(paths)})")
    return Corpus(patterns, _Files(paths, root, "strict"), stamp=stamp_of(paths))


@dataclass(frozen=True)
class _Files:
    """The files that are not empty, each as a document."""

    paths: list[Path]
    root: Path
    errors: str

    def __iter__(self) -> Iterator[Document]:
        for path in self.paths:
            if text := _read_utf8(path, self.errors):
                yield Document(path.relative_to(self.root).as_posix(), text)


def rows(cfg: DataConfig) -> Corpus:
    """The rows of a dataset; one row is one document, named by its content."""
    title = cfg.where[1].strip("'")
    validation = _Rows(cfg, held_out=True) if cfg.validation_is_given else ()
    return Corpus(title, _Rows(cfg, held_out=False), "row", validation, stamp_of_rows(cfg))


class _Rows:
    """The rows that hold text, which stay on disk. Its iterator raises DataError where there is none."""

    def __init__(self, cfg: DataConfig, held_out: bool):
        self._cfg, self._held_out = cfg, held_out

    @cached_property
    def _rows(self) -> Any:
        return open_rows(self._cfg, self._held_out)

    def __iter__(self) -> Iterator[Document]:
        read = read_documents(self._rows, self._cfg, self._held_out)
        texts = (text for text in read if text is not None)
        first = next(texts, None)
        if first is None:
            raise empty(self._cfg, self._held_out)
        yield from map(row_document, chain([first], texts))


def row_document(text: str) -> Document:
    """A row as a document. Its name is a hash of it, so equal rows are all trained on or all held out."""
    return Document(blake2b(text.encode(), digest_size=8).hexdigest(), text)


def _read_utf8(path: Path, errors: str) -> str:
    try:
        return path.read_bytes().decode("utf-8", errors)
    except UnicodeDecodeError as error:
        raise DataError(
            f"data.files: {path} is not UTF-8 text (byte {error.start}); convert it or leave it out"
        ) from None
    except MemoryError:
        gigabytes = path.stat().st_size / 1e9
        raise DataError(
            f"data.files: {path} is one document, and {gigabytes:.1f} GB do not fit into memory: split it, "
            "or make it rows (data.source=jsonl or parquet)"
        ) from None
    except OSError as error:
        raise DataError(f"data.files: {path} cannot be read: {error.strerror}") from None
