"""From a configuration to sequences of tokens ready to train on."""

from dataclasses import dataclass

import numpy as np

from tputrain.batches import IGNORED_LABEL
from tputrain.data.best_fit import BestFitSequences
from tputrain.data.changed_files import changed_files
from tputrain.data.config import BuildContext, Data, DataError, TextConfig
from tputrain.data.loading import TrainingBatches, ValidationBatches
from tputrain.data.packing import PackedSequences
from tputrain.data.padding import PaddedSequences
from tputrain.data.pretrained_tokenizer import PretrainedTokenizer, find_tokenizer
from tputrain.data.shuffled import ShuffledSequences, num_label_bytes
from tputrain.data.token_cache import entries_of, known_totals, text_fingerprint, tokenise
from tputrain.data.tokenizer import Tokenizer
from tputrain.data.workers import WorkerBatches
from tputrain.feed import IndexedLoader
from tputrain.figures import bytes_text

_SOME = 64  # sequences


@dataclass(frozen=True)
class TextData(Data):
    """What a run trains on and is judged by."""

    title: str
    unit: str
    """What a document is: file or row."""
    num_files: int
    num_bytes: int
    fingerprint: str
    """Names the text and its tokenisation: equal fingerprints give equal batches for equal seeds."""
    tokenizer: Tokenizer
    train: ShuffledSequences
    validation: ShuffledSequences
    num_workers: int = 0
    """Processes that put training batches together."""

    def describe(self) -> list[str]:
        """A few lines for people."""
        files = f"{self.num_files:,} {self.unit}{'s' * (self.num_files != 1)}"
        kind = "Hugging Face's" if isinstance(self.tokenizer, PretrainedTokenizer) else "byte-level BPE"
        some = self.validation.batch_of(np.arange(min(_SOME, self.validation.num_sequences)))
        num_labels = int((some["labels"] != IGNORED_LABEL).sum())
        bytes_per_token = num_label_bytes(some, self.tokenizer.token_bytes()) / max(1, num_labels)
        return [
            f"data: {self.title}, {files}, {bytes_text(self.num_bytes)}",
            f"tokenizer: {kind}, {self.tokenizer.vocab_size:,} entries, "
            f"about {bytes_per_token:.2f} bytes of text per token",
            f"train: {self.train.num_tokens:,} tokens in {self.train.num_sequences:,} sequences of "
            f"{self.train.sequence_length}, {self.train.num_documents:,} documents",
            f"validation: {self.validation.num_tokens:,} tokens in {self.validation.num_sequences:,} "
            f"sequences, {self.validation.num_documents:,} documents",
        ]

    @property
    def num_samples(self) -> int:
        """Sequences to train on."""
        return self.train.num_sequences

    def training_batches(self, size: int, micro_batches: int) -> IndexedLoader:
        """The Trainer's loader: micro-batches of `size` sequences, by step."""
        loader = TrainingBatches(self.train, size, micro_batches, self.fingerprint)
        return WorkerBatches(loader, micro_batches, self.num_workers) if self.num_workers > 0 else loader

    def evaluation_batches(self, size: int) -> ValidationBatches:
        """An evaluation's loader, which knows the bytes behind its labels."""
        return ValidationBatches(self.validation, size, self.tokenizer.token_bytes())


def build_data(cfg: TextConfig, context: BuildContext) -> TextData:
    """Read, tokenise (or take from the cache) and pack."""
    announce, tokenizer, expected = context.announce, context.tokenizer, context.expected
    corpus = cfg.corpus()
    totals = known_totals(corpus, cfg, announce)
    text = text_fingerprint(totals, cfg)
    # Before the tokenizer: this may be told in a second.
    if expected is not None and not expected.startswith(text):
        raise _other_text(cfg, corpus.title, expected)
    if tokenizer is None and cfg.tokenizer is not None:
        tokenizer = find_tokenizer(cfg.tokenizer)
    tokenised = tokenise(corpus, totals, cfg, announce, tokenizer)

    def pack(name: str) -> ShuffledSequences:
        part = getattr(tokenised, name)
        arguments = (part.tokens, part.offsets, cfg.sequence_length, context.seed, name, part.learned)
        padding_id = tokenised.tokenizer.end_of_text_id
        if cfg.layout == "packed":
            return PackedSequences(*arguments)
        if cfg.layout == "best_fit":
            return BestFitSequences(*arguments, padding_id=padding_id)
        return PaddedSequences(*arguments, padding_id=padding_id, buckets=cfg.buckets)

    return TextData(
        title=corpus.title,
        unit=corpus.unit,
        num_files=totals.num_documents,
        num_bytes=totals.num_bytes,
        fingerprint=f"{text}-{tokenised.tokenizer.digest()}",
        tokenizer=tokenised.tokenizer,
        train=pack("train"),
        validation=pack("validation"),
        num_workers=cfg.workers,
    )


def _other_text(cfg: TextConfig, title: str, expected: str) -> DataError:
    found, mend = f"the {title}", "use the Python that the run was started with"
    key, value = cfg.where()
    if value != "null":
        found, mend = "the text there", f"restore {cfg.to_restore}"
    files = cfg.files_behind()
    begun_with = entries_of(expected.partition("-")[0], cfg) if files else []
    changed = changed_files(files, begun_with) if begun_with else None
    which = "" if changed is None else f" ({changed})"
    return DataError(
        f"{key}={value}: {found} is not what this run was started with{which}; {mend}, or choose another "
        "run_dir"
    )
