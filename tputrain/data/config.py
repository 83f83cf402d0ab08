"""What the user may say about the data."""

from dataclasses import dataclass

from tputrain.errors import UserError


class DataError(UserError):
    """The data named in the configuration cannot be trained on; one line says why and what to change."""


@dataclass(frozen=True)
class DataConfig:
    """Text, how it becomes tokens, and how tokens become sequences. Nothing here depends on the seed."""

    files: str | None = None
    """UTF-8 text files as a glob, or several with commas between, `**` allowed; None: Python's own source."""
    sequence_length: int = 128
    """Tokens in a sequence."""
    vocab_size: int = 4096
    """Entries of the byte-level BPE vocabulary, `<|endoftext|>` and the 256 bytes included."""
    validation_fraction: float = 0.05
    """Share of the text, in bytes, held out for validation."""
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
