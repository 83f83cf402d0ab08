"""What the user may say about the data."""

from dataclasses import dataclass, fields

from tputrain.config_checks import expect, expect_at_least, expect_choice
from tputrain.errors import UserError

WITH_COLUMNS = ("jsonl", "csv", "parquet", "saved", "hub")
SOURCES = ("text", *WITH_COLUMNS, "docstrings", "digits")
FORMATS = ("text", "messages", "prompt")
LAYOUTS = ("packed", "padded")


class DataError(UserError):
    """The data named in the configuration cannot be trained on; one line says why and what to change."""


@dataclass(frozen=True)
class DataConfig:
    """Text, how it becomes tokens, and how tokens become sequences. Nothing here depends on the seed."""

    source: str = "text"
    """text: a file is a document; jsonl, csv, parquet: a row is one; saved: a directory that
    `datasets.save_to_disk` wrote; hub: a dataset of the Hugging Face hub; docstrings: questions about Python
    and their answers, made from its own source; digits: scikit-learn's images, with their classes."""
    files: str | None = None
    """Files as a glob, or several with commas between, `**` allowed; None: Python's own source (UTF-8)."""
    validation_files: str | None = None
    """Files of jsonl, csv or parquet to be judged by; None: a share of `files` is held out."""
    name: str | None = None
    """The directory of source=saved; the name, or the local directory, of source=hub."""
    subset: str | None = None
    """Which part of a dataset of the hub, where it has several."""
    split: str = "train"
    """What to train on, of source=saved and source=hub."""
    validation_split: str | None = None
    """What to be judged by; None: a share of `split` is held out."""
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
    tokenizer: str | None = None
    """Directory or name of a Hugging Face tokenizer, or a run with its own; None: a byte-level BPE is trained
    on the text."""
    vocab_size: int = 4096
    """Entries of the byte-level BPE vocabulary, `<|endoftext|>` and the 256 bytes included."""
    sequence_length: int = 128
    """Tokens in a sequence."""
    layout: str = "packed"
    """packed: documents end to end, no token wasted; padded: one document a row, similar lengths together."""
    buckets: int = 4
    """How many lengths padded batches may have: each is a program to compile."""
    validation_fraction: float = 0.05
    """Share of the text held out for validation: in bytes, and of rows in rows."""
    validation_documents: int = 256
    """Documents of a stream held out for validation, at most."""
    shuffle_block: int = 1024
    """Sequences of a stream that are read and then shuffled, at a time."""
    workers: int = 0
    """Processes that put batches together; 0: the training process does, which is enough for packed text."""
    prefetch: int = 2
    """Steps of a stream that are read ahead while the device computes."""
    cache_dir: str = "~/.cache/tputrain/data"
    """Where tokenizers and token arrays are kept between runs."""

    def __post_init__(self) -> None:
        if self.sequence_length < 2:
            raise DataError(f"data.sequence_length={self.sequence_length}: expected at least 2 tokens")
        if self.vocab_size < 257:
            raise DataError(
                f"data.vocab_size={self.vocab_size}: expected at least 257 (256 bytes and <|endoftext|>)"
            )
        if not 0.0 < self.validation_fraction < 1.0:
            raise DataError(
                f"data.validation_fraction={self.validation_fraction}: expected a share above 0 and below 1"
            )
        expect_choice("data.source", self.source, SOURCES)
        expect_choice("data.format", self.format, FORMATS)
        expect_choice("data.layout", self.layout, LAYOUTS)
        for key in ("validation_documents", "shuffle_block", "prefetch"):
            expect_at_least(f"data.{key}", getattr(self, key), 1)
        expect_at_least("data.workers", self.workers, 0)
        expect(
            1 <= self.buckets <= self.sequence_length,
            "data.buckets",
            self.buckets,
            f"1 to data.sequence_length={self.sequence_length}",
        )
        self._check_where()
        self._check_what_goes_together()

    def _check_where(self) -> None:
        by_name = self.source in ("saved", "hub")
        if by_name:
            what = "a directory" if self.source == "saved" else "the name of a dataset, or a directory,"
            expect(self.name is not None, "data.name", self.name, f"{what} with data.source={self.source}")
        elif self.source in ("jsonl", "csv", "parquet"):
            example = f"data.files='train/*.{self.source}'"
            expect(self.files is not None, "data.files", self.files, f"files to read, such as {example}")
        for key, value in (("name", self.name), ("validation_split", self.validation_split)):
            allowed = by_name or value is None
            expect(allowed, f"data.{key}", value, f"nothing with data.source={self.source} (saved, hub)")
        allowed = self.source in ("jsonl", "csv", "parquet")
        for key, value in (("files", self.files), ("validation_files", self.validation_files)):
            fits = allowed or value is None or (key == "files" and self.source == "text")
            expect(fits, f"data.{key}", value, f"null with data.source={self.source}")
        expect(
            self.subset is None or self.source == "hub",
            "data.subset",
            self.subset,
            f"nothing with data.source={self.source} (only a dataset of the hub has subsets)",
        )

    def _check_what_goes_together(self) -> None:
        expect(
            self.format == "text" or (self.is_rows and not self.is_images),
            "data.format",
            self.format,
            f"text with data.source={self.source}; columns come from {', '.join(WITH_COLUMNS)}",
        )
        if self.is_images:
            defaults = {key.name: key.default for key in fields(self)}
            for name in ("tokenizer", "vocab_size", "layout", "buckets", "workers", "prefetch"):
                value = getattr(self, name)
                expect(
                    value == defaults[name], f"data.{name}", value, f"nothing with data.source={self.source}"
                )
        if self.source == "docstrings":
            is_messages = self.format == "messages"
            expect(is_messages, "data.format", self.format, "messages with data.source=docstrings")
        if self.streaming:
            reads_rows = self.source not in ("text", "docstrings", "digits")
            expect(reads_rows, "data.streaming", True, f"false with data.source={self.source}, read whole")
            expect(self.layout == "packed", "data.layout", self.layout, "packed with data.streaming=true")
            expect(
                self.workers == 0, "data.workers", self.workers, "0 with data.streaming=true (data.prefetch)"
            )

    @property
    def is_images(self) -> bool:
        """Whether the data is images with classes, and no text."""
        return self.source == "digits"

    @property
    def is_rows(self) -> bool:
        """Whether a document is a row of a dataset, not a file."""
        return self.source != "text"

    @property
    def validation_is_given(self) -> bool:
        """Whether the user names what to be judged by, so that nothing is held out."""
        return self.validation_files is not None or self.validation_split is not None

    @property
    def where(self) -> tuple[str, str]:
        """The key that says where the data is, and its value."""
        if self.source in ("saved", "hub"):
            return "data.name", repr(self.name)
        return "data.files", "null" if self.files is None else repr(self.files)
