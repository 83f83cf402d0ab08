"""From a configuration to sequences of tokens ready to train on."""

from collections.abc import Callable
from dataclasses import dataclass

from tputrain.data.config import DataConfig, DataError
from tputrain.data.packing import PackedSequences
from tputrain.data.sources import read_corpus
from tputrain.data.token_cache import text_fingerprint, tokenise
from tputrain.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class TextData:
    """What a run trains on and is judged by."""

    title: str
    num_files: int
    num_bytes: int
    fingerprint: str
    """Names the text and its tokenisation: equal fingerprints give equal batches for equal seeds."""
    tokenizer: Tokenizer
    train: PackedSequences
    validation: PackedSequences
    validation_bytes_per_token: float
    """Of all the validation text. A mean loss over all of it in nats / ln 2 / this = its bits per byte."""

    def describe(self) -> list[str]:
        """A few lines for people."""
        files = f"{self.num_files:,} file{'s' * (self.num_files != 1)}"
        return [
            f"data: {self.title}, {files}, {_megabytes(self.num_bytes)}",
            f"tokenizer: byte-level BPE, {self.tokenizer.vocab_size:,} entries, "
            f"{self.validation_bytes_per_token:.2f} bytes per token on validation text",
            f"train: {self.train.num_tokens:,} tokens in {self.train.num_sequences:,} sequences of "
            f"{self.train.sequence_length}, {self.train.num_documents:,} documents",
            f"validation: {self.validation.num_tokens:,} tokens in {self.validation.num_sequences:,} "
            f"sequences, {self.validation.num_documents:,} documents",
        ]


def build_data(
    cfg: DataConfig,
    seed: int,
    announce: Callable[[str], None] = print,
    tokenizer: Tokenizer | None = None,
    expected: str | None = None,
) -> TextData:
    """Read, tokenise (or take from the cache) and pack; `seed` decides only the order of training sequences.

    A run that goes on gives its own `tokenizer` (None: one is trained) and, as `expected`, the fingerprint of
    the data it was started with. `announce` gets a line before and after anything that takes seconds. Raises
    DataError, one line, where there is no text to train on, too little of it, or not the expected one.
    """
    corpus = read_corpus(cfg)
    text = text_fingerprint(corpus, cfg)
    # Before the tokenizer: this may be told in a second.
    if expected is not None and not expected.startswith(text):
        raise _other_text(cfg, corpus.title)
    tokenised = tokenise(corpus, cfg, announce, tokenizer)

    def pack(name: str) -> PackedSequences:
        part = getattr(tokenised, name)
        return PackedSequences(part.tokens, part.offsets, cfg.sequence_length, seed, name)

    train, validation = pack("train"), pack("validation")
    return TextData(
        title=corpus.title,
        num_files=len(corpus.documents),
        num_bytes=corpus.num_bytes,
        fingerprint=f"{text}-{tokenised.tokenizer.digest()}",
        tokenizer=tokenised.tokenizer,
        train=train,
        validation=validation,
        validation_bytes_per_token=validation.bytes_per_label(tokenised.tokenizer.token_bytes()),
    )


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.1f} MB" if num_bytes >= 100_000 else f"{num_bytes / 1e3:.1f} kB"


def _other_text(cfg: DataConfig, title: str) -> DataError:
    found, mend = f"the {title}", "use the Python that the run was started with"
    if cfg.files is not None:
        found, mend = "the text there", "restore the files"
    return DataError(
        f"data.files={'null' if cfg.files is None else repr(cfg.files)}: {found} is not what this run was "
        f"started with; {mend}, or choose another run_dir"
    )
