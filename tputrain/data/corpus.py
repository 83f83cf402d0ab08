"""A corpus: documents that are read anew each time they are looked at, and what all of them add up to.

Nothing here holds more than one document at a time, so a corpus may be larger than memory.
"""

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b

import numpy as np

from tputrain.data.config import DataError


@dataclass(frozen=True)
class Document:
    """One text: `path` (relative, with forward slashes) names it, whatever machine it lies on."""

    path: str
    text: str


def row_document(text: str) -> Document:
    """A row as a document. Its name is a hash of it, so equal rows are all trained on or all held out."""
    return Document(blake2b(text.encode(), digest_size=8).hexdigest(), text)


@dataclass(frozen=True)
class Totals:
    """Of all documents of a corpus, those to be judged by included."""

    digest: str
    """A hash of every path and text, in order."""
    num_bytes: int
    """In UTF-8."""
    num_documents: int


@dataclass(frozen=True)
class Survey:
    """What one pass over a corpus finds out."""

    totals: Totals
    sizes: np.ndarray
    """UTF-8 bytes of each of `Corpus.documents` (int64)."""
    places: np.ndarray
    """A number (uint64) that the path alone decides, of each of `Corpus.documents`."""


@dataclass(frozen=True)
class Corpus:
    """Documents in a fixed order, and a short title for people."""

    title: str
    documents: Iterable[Document]
    """May be iterated several times."""
    unit: str = "file"
    """What a document is: a file; or a row or question, which is never cut in two."""
    validation: Iterable[Document] = ()
    """What to be judged by, where the user names it."""
    stamp: str | None = None
    """Changes when the documents do, and is known without reading them; None: not known."""

    @cached_property
    def survey(self) -> Survey:
        """Reads every document."""
        digest = blake2b(digest_size=16)
        sizes, places = array("q"), array("Q")
        num_bytes = num_documents = 0
        for is_validation, documents in ((False, self.documents), (True, self.validation)):
            for document in documents:
                path, text = document.path.encode(), document.text.encode()
                for part in (path, text):
                    digest.update(len(part).to_bytes(8, "little"))
                    digest.update(part)
                num_bytes, num_documents = num_bytes + len(text), num_documents + 1
                if not is_validation:
                    sizes.append(len(text))
                    places.append(_place(document))
        totals = Totals(digest.hexdigest(), num_bytes, num_documents)
        return Survey(totals, np.array(sizes), np.array(places))


def split(corpus: Corpus, validation_fraction: float) -> Iterator[tuple[Document, bool]]:
    """Each document, or part of one, and whether it is held out for validation.

    Which side a document is on depends on nothing but its path. Few or very unequal files cannot be split
    that way (validation would be empty, or most of the text): where the held-out share would be under half or
    over twice `validation_fraction`, the end of each file is held out; of rows, which stay whole, those that
    come first by their hash.
    """
    if corpus.validation:
        yield from ((document, False) for document in corpus.documents)
        yield from ((document, True) for document in corpus.validation)
        return
    survey = corpus.survey
    held_out = survey.places < np.uint64(validation_fraction * 2**64)  # as `is_held_out` says
    share = survey.sizes[held_out].sum() / survey.totals.num_bytes
    if not validation_fraction / 2 <= share <= min(2 * validation_fraction, (1 + validation_fraction) / 2):
        if corpus.unit == "file":
            yield from _cut_files(corpus.documents, validation_fraction)
            return
        held_out = _first_rows(corpus, survey.places, validation_fraction)
    yield from zip(corpus.documents, held_out.tolist(), strict=True)


def is_held_out(document: Document, validation_fraction: float) -> bool:
    """Whether the document is one to be judged by, as its path alone decides."""
    return _place(document) < validation_fraction * 2**64


def _place(document: Document) -> int:
    return int.from_bytes(blake2b(document.path.encode(), digest_size=8).digest(), "little")


def _cut_files(documents: Iterable[Document], validation_fraction: float) -> Iterator[tuple[Document, bool]]:
    for document in documents:
        cut = round(len(document.text) * (1 - validation_fraction))
        # At a line's end where there is one: half a line is an odd thing to be judged by.
        cut = document.text.rfind("\n", 0, cut) + 1 or cut
        for text, is_validation in ((document.text[:cut], False), (document.text[cut:], True)):
            if text:
                yield Document(document.path, text), is_validation


def _first_rows(corpus: Corpus, places: np.ndarray, validation_fraction: float) -> np.ndarray:
    known = np.unique(places)
    if len(known) < 2:
        raise DataError(
            f"{corpus.title}: there is 1 row (equal ones count once), at least 2 are needed: one is held out "
            "for validation; give more, or data.validation_files or data.validation_split"
        )
    return places <= known[max(1, min(round(len(known) * validation_fraction), len(known) - 1)) - 1]
