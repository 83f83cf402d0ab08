"""Sources whose documents are rows: files of jsonl, csv or parquet, saved datasets, the hub."""

import re
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

from tputrain.config_checks import did_you_mean, expect
from tputrain.data.config import BuildContext, Data, DataError, RowsConfig
from tputrain.data.corpus import Corpus, Document, row_document
from tputrain.data.files import find_files, nearest_path
from tputrain.data.row_place import broken_line, place_of_row
from tputrain.data.rows import empty, known_name, open_rows, read_documents
from tputrain.data.stamp import hash_of, stamp_of
from tputrain.data.streaming import build_stream
from tputrain.data.text import build_data
from tputrain.hub import asking_hub, is_path

_BUILDERS = {"jsonl": "json", "csv": "csv", "parquet": "parquet"}


class _Read(RowsConfig):
    """Rows as a corpus, and as what a run trains on."""

    def _build(self, context: BuildContext) -> Data:
        return build_stream(self, context) if self.streaming else build_data(self, context)

    def corpus(self) -> Corpus:
        validation = _Rows(self, held_out=True) if self.validation_is_given else ()
        title = self.where()[1].strip("'")
        return Corpus(title, _Rows(self, held_out=False), "row", validation, self.stamp())


@dataclass(frozen=True)
class FileRowsConfig(_Read, names=("jsonl", "csv", "parquet")):
    """Files, a row of which is a document."""

    source: str = "jsonl"
    files: str | None = None
    """Files as a glob, or several with commas between, `**` allowed."""
    validation_files: str | None = None
    """Files to be judged by; None: a share of `files` is held out."""

    def __post_init__(self) -> None:
        super().__post_init__()
        example = f"data.files='train/*.{self.source}'"
        expect(self.files is not None, "data.files", self.files, f"files to read, such as {example}")

    @property
    def readable(self) -> str:
        return f"{self.source} files with the same columns"

    @property
    def validation_is_given(self) -> bool:
        return self.validation_files is not None

    def where(self, held_out: bool = False) -> tuple[str, str]:
        if held_out and self.validation_files is not None:
            return "data.validation_files", repr(self.validation_files)
        return "data.files", repr(self.files)

    def files_behind(self) -> list[Path]:
        return [*self._files(False), *(self._files(True) if self.validation_is_given else [])]

    def _files(self, held_out: bool) -> list[Path]:
        key = "validation_files" if held_out else "files"
        return find_files(str(getattr(self, key)), f"data.{key}")

    def load(self, held_out: bool) -> Any:
        import datasets

        return datasets.load_dataset(
            _BUILDERS[self.source],
            data_files=[str(path) for path in self._files(held_out)],
            split="train",  # what the library calls files that are not said to be of any split
            streaming=self.streaming,
            cache_dir=str(Path(self.cache_dir).expanduser() / "datasets"),
        )

    def row_place(self, number: int, held_out: bool) -> str | None:
        return place_of_row(self._files(held_out), self.source, number)

    def fault(self, held_out: bool, reason: str) -> str:
        if self.source != "jsonl":
            return reason
        # Of JSON the library names no file, and counts rows from 0 and a block's beginning.
        return broken_line(self._files(held_out)) or re.sub(r" in row \d+$", "", reason)

    def stamp(self) -> str | None:
        num_held_out = len(self._files(True)) if self.validation_is_given else 0
        return stamp_of(self.files_behind(), [*self.choices(), None, "train", None, num_held_out])


@dataclass(frozen=True)
class SavedRowsConfig(_Read, names=("saved",)):
    """A directory that `datasets.save_to_disk` wrote."""

    source: str = "saved"
    name: str | None = None
    """The directory."""
    split: str = "train"
    """What to train on."""
    validation_split: str | None = None
    """What to be judged by; None: a share of `split` is held out."""

    to_restore: ClassVar[str] = "it"
    named: ClassVar[str] = "a directory"

    def __post_init__(self) -> None:
        super().__post_init__()
        expect(self.name is not None, "data.name", self.name, f"{self.named} with data.source={self.source}")

    @property
    def readable(self) -> str:
        return "a directory that datasets.save_to_disk wrote"

    @property
    def validation_is_given(self) -> bool:
        return self.validation_split is not None

    @property
    def path(self) -> Path:
        """`name` as a directory."""
        return Path(str(self.name)).expanduser()

    def where(self, held_out: bool = False) -> tuple[str, str]:
        return "data.name", repr(self.name)

    def files_behind(self) -> list[Path]:
        self._expect_directory()
        return sorted(path for path in self.path.rglob("*") if path.is_file())

    def load(self, held_out: bool) -> Any:
        import datasets

        self._expect_directory()
        dataset = datasets.load_from_disk(str(self.path))
        if isinstance(dataset, datasets.DatasetDict):
            key = "validation_split" if held_out else "split"
            split = known_name(f"data.{key}", getattr(self, key), list(dataset), f"split in {self.name}")
            dataset = dataset[split]
        elif held_out:
            raise DataError(
                f"data.validation_split={self.validation_split}: {self.name} is one dataset, unsplit"
            )
        return dataset.to_iterable_dataset() if self.streaming else dataset

    def _expect_directory(self) -> None:
        if not self.path.is_dir():
            hint = did_you_mean(nearest_path(str(self.name)))
            raise DataError(f"data.name={self.name!r}: no such directory{hint}")

    def choices(self) -> list[Any]:
        return [*super().choices(), None, self.split, self.validation_split]

    def stamp(self) -> str | None:
        return stamp_of(self.files_behind(), self.choices())


@dataclass(frozen=True)
class HubRowsConfig(SavedRowsConfig, names=("hub",)):
    """A dataset of the Hugging Face hub, or a directory with data files."""

    source: str = "hub"
    subset: str | None = None
    """Which part of the dataset, where it has several."""

    named: ClassVar[str] = "the name of a dataset, or a directory,"

    @property
    def readable(self) -> str:
        return "a name on the Hugging Face hub (and a network), or a directory with data files"

    def load(self, held_out: bool) -> Any:
        import datasets

        self._expect_directory()
        name, split = str(self.name), self.validation_split if held_out else self.split
        is_here = Path(name).is_dir()
        with nullcontext() if is_here else asking_hub(f"data.name={name} ({split})"):
            return datasets.load_dataset(name, self.subset, split=split, streaming=self.streaming)

    def _expect_directory(self) -> None:
        if is_path(str(self.name)):  # else it is on the hub
            super()._expect_directory()

    def choices(self) -> list[Any]:
        return [*RowsConfig.choices(self), self.subset, self.split, self.validation_split]

    def stamp(self) -> str | None:
        if self.path.is_dir():
            return super().stamp()
        parts = [False, True] if self.validation_is_given else [False]
        return hash_of([[open_rows(self, held_out)._fingerprint for held_out in parts], self.choices()])


class _Rows:
    """The rows that hold text, which stay on disk. Its iterator raises DataError where there is none."""

    def __init__(self, cfg: RowsConfig, held_out: bool):
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
