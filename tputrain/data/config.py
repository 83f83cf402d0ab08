"""What all kinds of data have in common. Each kind stands beside what reads it."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from tputrain.batches import Batch
from tputrain.config_checks import expect, expect_at_least, expect_choice
from tputrain.errors import UserError
from tputrain.kinds import Family

if TYPE_CHECKING:
    from tputrain.data.corpus import Corpus
    from tputrain.data.tokenizer import Tokenizer

FORMATS = ("text", "messages", "prompt")
LAYOUTS = ("packed", "best_fit", "padded")


class DataError(UserError):
    """The data named in the configuration cannot be trained on; one line says why and what to change."""


class Data(ABC):
    """What a run trains on and is judged by, of whatever kind."""

    title: str
    fingerprint: str
    """Names the data: a run goes on with the same."""
    tokenizer: "Tokenizer | None"
    """None: it is no text."""

    @property
    @abstractmethod
    def num_samples(self) -> int | None:
        """Sequences or images to train on; None: nobody knows, they are a stream."""

    @abstractmethod
    def describe(self) -> list[str]:
        """A few lines for people."""

    @abstractmethod
    def training_batches(self, size: int, micro_batches: int) -> Any:
        """The Trainer's loader: `micro_batches` of `size` samples a step."""

    @abstractmethod
    def evaluation_batches(self, size: int) -> Iterable[Batch]:
        """An evaluation's loader: batches of `size` samples."""


@dataclass(frozen=True)
class BuildContext:
    """What the run that builds its data says of itself."""

    seed: int
    """Decides only the order of training samples."""
    announce: Callable[[str], None] = print
    """Gets a line before and after anything that takes seconds."""
    tokenizer: "Tokenizer | None" = None
    """The run's own, if it goes on; None: the one that the configuration names, or trains."""
    expected: str | None = None
    """The fingerprint of the data that the run was started with, if it goes on."""


def bucket_lengths(longest: int, buckets: int) -> list[int]:
    """The lengths of padded batches, evenly up to the longest."""
    return [-(-longest * number // buckets) for number in range(1, buckets + 1)]


@dataclass(frozen=True)
class DataConfig(Family, group="data", by="source"):
    """Where the data comes from, and how much of it is held out. Nothing here depends on the seed."""

    source: str = "text"
    """text: a file is a document; jsonl, csv, parquet: a row is one; saved: a directory that
    `datasets.save_to_disk` wrote; hub: a dataset of the Hugging Face hub; docstrings: questions about Python
    and their answers, made from its own source; mixture: several of these; digits: scikit-learn's images and
    their classes."""
    validation_fraction: float = 0.05
    """Share of the data held out for validation: of files in bytes, of rows in rows."""

    is_text: ClassVar[bool] = True
    """Whether samples are sequences of tokens, else images with classes."""

    def __post_init__(self) -> None:
        if not 0.0 < self.validation_fraction < 1.0:
            raise DataError(
                f"data.validation_fraction={self.validation_fraction}: expected a share above 0 and below 1"
            )

    @property
    def sequence_length(self) -> int | None:
        """Tokens in a sequence; None where there are none."""
        return None

    @property
    def lengths(self) -> list[int]:
        """Tokens that the sequences of a batch may have; none where there are no tokens."""
        return []

    @property
    def has_conversations(self) -> bool:
        """Whether any of the text is written as conversations are."""
        return False

    @property
    def trained_vocab_size(self) -> int | None:
        """Entries of the tokenizer that is trained on the text; None where none is."""
        return None

    def build(
        self,
        seed: int,
        announce: Callable[[str], None] = print,
        tokenizer: "Tokenizer | None" = None,
        expected: str | None = None,
    ) -> Data:
        """Read the data, or as much as is needed. `BuildContext` explains the arguments.

        Raises DataError, one line, if there is nothing to train on, too little of it, or not the expected
        data.
        """
        return self._build(BuildContext(seed, announce, tokenizer, expected))

    def _build(self, context: BuildContext) -> Data:
        """What each kind does for `build`."""
        raise NotImplementedError

    def example(self, rows: int) -> dict[str, Tensor]:
        """A batch of so many samples without values, on the meta device."""
        raise NotImplementedError


@dataclass(frozen=True)
class TextConfig(DataConfig):
    """Text of any source: how it becomes tokens, and how tokens become sequences."""

    tokenizer: str | None = None
    """Directory or name of a Hugging Face tokenizer, or a run with its own; None: a byte-level BPE is trained
    on the text."""
    vocab_size: int = 4096
    """Entries of the byte-level BPE vocabulary, `<|endoftext|>` and the 256 bytes included."""
    sequence_length: int = 128
    """Tokens in a sequence."""
    layout: str = "packed"
    """packed: documents end to end, no token wasted; best_fit: whole documents put together, none cut that
    fits a sequence; padded: one document a row, similar lengths together."""
    buckets: int = 4
    """How many lengths padded batches may have: each is a program to compile."""
    workers: int = 0
    """Processes that put batches together; 0: the training process does, which is enough for packed text."""
    cache_dir: str = "~/.cache/tputrain/data"
    """Where tokenizers and token arrays are kept between runs."""

    to_restore: ClassVar[str] = "the files"
    """What a user restores where the text is not the one that a run was started with."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sequence_length < 2:
            raise DataError(f"data.sequence_length={self.sequence_length}: expected at least 2 tokens")
        if self.vocab_size < 257:
            raise DataError(
                f"data.vocab_size={self.vocab_size}: expected at least 257 (256 bytes and <|endoftext|>)"
            )
        expect_choice("data.layout", self.layout, LAYOUTS)
        expect_at_least("data.workers", self.workers, 0)
        expect(
            1 <= self.buckets <= self.sequence_length,
            "data.buckets",
            self.buckets,
            f"1 to data.sequence_length={self.sequence_length}",
        )

    @property
    def lengths(self) -> list[int]:
        return bucket_lengths(self.sequence_length, self.buckets if self.layout == "padded" else 1)

    @property
    def format(self) -> str:
        """What of a document is learned, and how it is written: one of `FORMATS`."""
        return "text"

    @property
    def has_conversations(self) -> bool:
        return self.format != "text"

    @property
    def trained_vocab_size(self) -> int | None:
        """Entries of the tokenizer that is trained on the text; None where one is given."""
        return self.vocab_size if self.tokenizer is None else None

    def where(self, held_out: bool = False) -> tuple[str, str]:
        """The key that says where the text is, or that to be judged by, and its value."""
        return "data.files", "null"

    def files_behind(self) -> list[Path]:
        """The user's files that the text is read from; none where it is not the user's."""
        return []

    def corpus(self) -> "Corpus":
        """The text, read when it is looked at. Raises DataError where there is none."""
        raise NotImplementedError

    def example(self, rows: int) -> dict[str, Tensor]:
        """A batch of so many sequences without values, on the meta device."""
        names, size = ("input_ids", "labels", "position_ids", "document_ids"), (rows, self.sequence_length)
        return {name: torch.empty(size, dtype=torch.int64, device="meta") for name in names}


@dataclass(frozen=True)
class RowsConfig(TextConfig):
    """Rows of a dataset, each of which is a document: which columns count, and whether they are streamed."""

    streaming: bool = False
    """Read while training, and never hold all of it; shuffled within `shuffle_block`."""
    format: str = "text"
    """text: all of `text_column` is learned; messages, prompt: answers alone are, the rest is only read."""
    text_column: str = "text"
    """The column of format=text."""
    messages_column: str = "messages"
    """The column of format=messages: lists of {role, content}, the answers have the role assistant."""
    prompt_column: str = "prompt"
    """The question's column of format=prompt."""
    answer_column: str = "answer"
    """The answer's column of format=prompt."""
    validation_documents: int = 256
    """Documents of a stream held out for validation, at most."""
    shuffle_block: int = 1024
    """Sequences of a stream that are read and then shuffled, at a time."""
    prefetch: int = 2
    """Steps of a stream that are read ahead while the device computes."""

    def __post_init__(self) -> None:
        super().__post_init__()
        expect_choice("data.format", self.format, FORMATS)
        for key in ("validation_documents", "shuffle_block", "prefetch"):
            expect_at_least(f"data.{key}", getattr(self, key), 1)
        if self.streaming:
            expect(self.layout == "packed", "data.layout", self.layout, "packed with data.streaming=true")
            expect(
                self.workers == 0, "data.workers", self.workers, "0 with data.streaming=true (data.prefetch)"
            )

    @property
    def readable(self) -> str:
        """What can be read as such rows, for an error."""
        raise NotImplementedError

    @property
    def validation_is_given(self) -> bool:
        """Whether the user names what to be judged by, so that nothing is held out."""
        raise NotImplementedError

    def load(self, held_out: bool) -> Any:
        """The dataset, or the one to be judged by; what it raises is put in words by `rows.open_rows`."""
        raise NotImplementedError

    def row_place(self, number: int, held_out: bool) -> str | None:
        """Row `number` (from 0) by its file and line, where that can be told."""
        return None

    def fault(self, held_out: bool, reason: str) -> str:
        """What is broken in the rows, with its place if that can be told. `reason`: what the library said."""
        return reason

    def choices(self) -> list[Any]:
        """How the rows are read, as JSON: part of the stamp by which they are known again."""
        columns = [self.text_column, self.messages_column, self.prompt_column, self.answer_column]
        return [self.source, self.format, *columns]

    def stamp(self) -> str | None:
        """A name for what is behind the rows and how it is read; None where a file changed just now."""
        raise NotImplementedError
