"""Sources whose documents are files: the standard library's source by default, or the user's text; and the
conversations that are made from that source.
"""

import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from platform import python_version

from tputrain.config_checks import expect_choice
from tputrain.data.config import BuildContext, Data, DataError, TextConfig
from tputrain.data.corpus import Corpus, Document, row_document
from tputrain.data.docstrings import docstring_conversations
from tputrain.data.files import find_files
from tputrain.data.stamp import stamp_of
from tputrain.data.text import build_data

# Tests are repetitive and site-packages differs from machine to machine; neither belongs in a default corpus.
_SKIPPED_DIRECTORIES = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
# Written by each build of the interpreter, full of that machine's paths.
_SKIPPED_PREFIX = "_sysconfigdata"
_SMALLEST_STANDARD_LIBRARY = 6_000_000  # bytes


class CorpusConfig(TextConfig):
    """Text that is read whole before the first step."""

    def _build(self, context: BuildContext) -> Data:
        return build_data(self, context)


@dataclass(frozen=True)
class TextFilesConfig(CorpusConfig, names=("text",)):
    """Files of text, each of which is a document."""

    source: str = "text"
    files: str | None = None
    """Files as a glob, or several with commas between, `**` allowed; None: Python's own source (UTF-8)."""

    def where(self, held_out: bool = False) -> tuple[str, str]:
        return "data.files", "null" if self.files is None else repr(self.files)

    def files_behind(self) -> list[Path]:
        return [] if self.files is None else find_files(self.files)

    def corpus(self) -> Corpus:
        return python_source() if self.files is None else text_files(self.files)


@dataclass(frozen=True)
class DocstringsConfig(CorpusConfig, names=("docstrings",)):
    """Questions about the standard library, answered by its docstrings; a conversation is one document."""

    source: str = "docstrings"
    format: str = "messages"
    """messages: answers alone are learned."""

    def __post_init__(self) -> None:
        super().__post_init__()
        expect_choice("data.format", self.format, ("messages",))

    def corpus(self) -> Corpus:
        source = python_source()
        made = docstring_conversations(
            ((document.path, document.text) for document in source.documents),
            source.survey.totals.digest,
            self.cache_dir,
        )
        return Corpus(f"questions about the {source.title}", [*map(row_document, made)], unit="question")


def python_source() -> Corpus:
    """The standard library of the running interpreter."""
    return standard_library(Path(sysconfig.get_path("stdlib")))


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
