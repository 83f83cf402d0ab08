"""Where text comes from: the standard library's source by default, the user's files, a dataset's rows."""

import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from platform import python_version

from tputrain.data.config import DataConfig, DataError
from tputrain.data.docstrings import docstring_conversations
from tputrain.data.files import find_files
from tputrain.data.rows import empty, open_rows, read_documents

# Tests are repetitive and site-packages differs from machine to machine; neither belongs in a default corpus.
_SKIPPED_DIRECTORIES = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
# Written by each build of the interpreter, full of that machine's paths.
_SKIPPED_PREFIX = "_sysconfigdata"
_SMALLEST_STANDARD_LIBRARY = 6_000_000  # bytes


@dataclass(frozen=True)
class Document:
    """One text: `path` (relative, with forward slashes) names it, whatever machine it lies on."""

    path: str
    text: str

    @cached_property
    def num_bytes(self) -> int:
        """UTF-8 bytes of the text."""
        return len(self.text.encode())


@dataclass(frozen=True)
class Corpus:
    """Documents in a fixed order, and a short title for people."""

    title: str
    documents: tuple[Document, ...]
    unit: str = "file"
    """What a document is: a file; or a row or question, which is never cut in two."""
    validation: tuple[Document, ...] = ()
    """What to be judged by, where the user names it."""

    @cached_property
    def num_bytes(self) -> int:
        """UTF-8 bytes of all documents."""
        return sum(document.num_bytes for document in (*self.documents, *self.validation))

    def digest(self) -> bytes:
        """A hash of every path and text, in order."""
        digest = blake2b(digest_size=16)
        for document in (*self.documents, *self.validation):
            for part in (document.path.encode(), document.text.encode()):
                digest.update(len(part).to_bytes(8, "little"))
                digest.update(part)
        return digest.digest()


def read_corpus(cfg: DataConfig) -> Corpus:
    """The text that `cfg` names. Raises DataError where there is none to train on."""
    if cfg.source == "docstrings":
        return docstrings(cfg)
    if cfg.is_rows:
        return rows(cfg)
    if cfg.files is None:
        return standard_library(Path(sysconfig.get_path("stdlib")))
    return text_files(cfg.files)


def standard_library(root: Path) -> Corpus:
    """The Python source below `root`, without tests and installed packages."""
    corpus = Corpus(f"Python {python_version()} standard library", tuple(_read_python_source(root)))
    if corpus.num_bytes < _SMALLEST_STANDARD_LIBRARY:
        raise DataError(
            f"the standard library in {root} holds {corpus.num_bytes / 1e6:.1f} MB of Python source, "
            f"at least {_SMALLEST_STANDARD_LIBRARY / 1e6:.0f} MB are needed: set data.files, for instance "
            "data.files='notes/*.txt'"
        )
    return corpus


def docstrings(cfg: DataConfig) -> Corpus:
    """Questions about the standard library, answered by its docstrings; a conversation is one document."""
    source = standard_library(Path(sysconfig.get_path("stdlib")))
    files = [(document.path, document.text) for document in source.documents]
    made = docstring_conversations(files, source.digest().hex(), cfg.cache_dir)
    return Corpus(
        f"questions about the {source.title}", tuple(row_document(text) for text in made), unit="question"
    )


def _read_python_source(root: Path) -> Iterator[Document]:
    for directory, subdirectories, names in os.walk(root):
        subdirectories[:] = sorted(set(subdirectories) - _SKIPPED_DIRECTORIES)
        for name in sorted(names):
            path = Path(directory, name)
            if path.suffix == ".py" and not name.startswith(_SKIPPED_PREFIX) and path.is_file():
                text = path.read_text(encoding="utf-8", errors="replace")
                if text:
                    yield Document(path.relative_to(root).as_posix(), text)


def text_files(patterns: str) -> Corpus:
    """The non-empty UTF-8 files that match the comma-separated globs; one file is one document."""
    paths = find_files(patterns)
    # Paths relative to what the files share, so that the split into train and validation survives a move.
    root = Path(os.path.commonpath([path.parent for path in paths]))
    found = tuple(
        Document(path.relative_to(root).as_posix(), text) for path in paths if (text := _read_utf8(path))
    )
    if not found:
        raise DataError(f"data.files={patterns!r}: all files that match are empty ({len(paths)})")
    return Corpus(patterns, found)


def rows(cfg: DataConfig) -> Corpus:
    """The rows of a dataset; one row is one document, named by its content."""

    def read(held_out: bool) -> tuple[Document, ...]:
        found = tuple(
            row_document(text) for text in read_documents(open_rows(cfg, held_out), cfg) if text is not None
        )
        if not found:
            raise empty(cfg)
        return found

    return Corpus(cfg.where[1].strip("'"), read(False), "row", read(True) if cfg.validation_is_given else ())


def row_document(text: str) -> Document:
    """A row as a document. Its name is a hash of it, so equal rows are all trained on or all held out."""
    return Document(blake2b(text.encode(), digest_size=8).hexdigest(), text)


def _read_utf8(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"data.files: {path} is not UTF-8 text (byte {error.start}); convert it or leave it out"
        ) from None
    except OSError as error:
        raise DataError(f"data.files: {path} cannot be read: {error.strerror}") from None


def split(corpus: Corpus, validation_fraction: float) -> tuple[list[Document], list[Document]]:
    """Train and validation documents; which side a document is on depends on nothing but its path.

    Few or very unequal files cannot be split that way (validation would be empty, or most of the text):
    where the held-out share would be under half or over twice `validation_fraction`, the end of each file
    is held out; of rows, which stay whole, those that come first by their hash.
    """
    if corpus.validation:
        return list(corpus.documents), list(corpus.validation)
    validation = [document for document in corpus.documents if is_held_out(document, validation_fraction)]
    share = sum(document.num_bytes for document in validation) / corpus.num_bytes
    if validation_fraction / 2 <= share <= min(2 * validation_fraction, (1 + validation_fraction) / 2):
        return [d for d in corpus.documents if not is_held_out(d, validation_fraction)], validation
    if corpus.unit != "file":
        return _split_rows(corpus, validation_fraction)
    train, validation = [], []
    for document in corpus.documents:
        cut = round(len(document.text) * (1 - validation_fraction))
        # At a line's end where there is one: half a line is an odd thing to be judged by.
        cut = document.text.rfind("\n", 0, cut) + 1 or cut
        train.append(Document(document.path, document.text[:cut]))
        validation.append(Document(document.path, document.text[cut:]))
    return [part for part in train if part.text], [part for part in validation if part.text]


def is_held_out(document: Document, validation_fraction: float) -> bool:
    """Whether the document is one to be judged by, as its path alone decides."""
    return _place(document) < validation_fraction * 2**64


def _place(document: Document) -> int:
    return int.from_bytes(blake2b(document.path.encode(), digest_size=8).digest(), "little")


def _split_rows(corpus: Corpus, validation_fraction: float) -> tuple[list[Document], list[Document]]:
    places = sorted({_place(document) for document in corpus.documents})
    if len(places) < 2:
        raise DataError(
            f"{corpus.title}: there is 1 row (equal ones count once), at least 2 are needed: one is held out "
            "for validation; give more, or data.validation_files or data.validation_split"
        )
    last = places[max(1, min(round(len(places) * validation_fraction), len(places) - 1)) - 1]
    train = [document for document in corpus.documents if _place(document) > last]
    return train, [document for document in corpus.documents if _place(document) <= last]
