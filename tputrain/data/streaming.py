"""Text that is read while it is trained on, and goes on where it was after a resume."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from typing import Any

import numpy as np
import torch

from tputrain.data.config import BuildContext, Data, DataError, RowsConfig
from tputrain.data.conversations import encode_conversations, spoken
from tputrain.data.corpus import is_held_out, row_document
from tputrain.data.loading import ValidationBatches
from tputrain.data.packing import PackedSequences
from tputrain.data.pretrained_tokenizer import find_tokenizer
from tputrain.data.rows import empty, open_rows, read_documents
from tputrain.data.shuffled import Batch, ShuffledSequences, epoch_order
from tputrain.data.tokenizer import Tokenizer
from tputrain.prefetch import Prefetched

_TOKENIZER_DOCUMENTS = 4096
"""From so many the vocabulary is learned, where none is given."""


@dataclass(frozen=True)
class StreamedText(Data):
    """What a run trains on, as a stream, and is judged by."""

    title: str
    fingerprint: str
    """Names the held-out text and the tokenizer: all that is known of a stream before it is read."""
    tokenizer: Tokenizer
    validation: ShuffledSequences
    cfg: RowsConfig
    seed: int

    def describe(self) -> list[str]:
        """A few lines for people."""
        block = self.cfg.shuffle_block
        return [
            f"data: {self.title}, streaming, shuffled within {block:,} sequences",
            f"tokenizer: {self.tokenizer.vocab_size:,} entries",
            f"validation: {self.validation.num_tokens:,} tokens in {self.validation.num_sequences:,} "
            f"sequences, {self.validation.num_documents:,} documents",
        ]

    @property
    def num_samples(self) -> None:
        """Nobody knows how many sequences there are to train on."""
        return None

    def training_batches(self, size: int, micro_batches: int) -> "StreamedBatches":
        """The Trainer's loader: one that resumes by its `state_dict`."""
        rows = open_rows(self.cfg)
        ahead = self.cfg.prefetch * micro_batches
        return StreamedBatches(rows, self.cfg, self.tokenizer, self.seed, size, ahead, self.fingerprint)

    def evaluation_batches(self, size: int) -> ValidationBatches:
        """An evaluation's loader, which knows the bytes behind its labels."""
        return ValidationBatches(self.validation, size, self.tokenizer.token_bytes())


def build_stream(cfg: RowsConfig, context: BuildContext) -> StreamedText:
    """Read as much of the stream as is held out and as a tokenizer is learned from.

    Raises DataError, one line, if there is no text to train on, or not the expected one.
    """
    tokenizer, expected = context.tokenizer, context.expected
    if tokenizer is None and cfg.tokenizer is not None:
        tokenizer = find_tokenizer(cfg.tokenizer)
    context.announce("data: reading the beginning of {}={}".format(*cfg.where()))
    head, validation = _read_head(cfg, 0 if tokenizer is not None else _TOKENIZER_DOCUMENTS)
    if cfg.validation_is_given:
        given = read_documents(open_rows(cfg, held_out=True), cfg, held_out=True)
        validation = list(islice((text for text in given if text is not None), cfg.validation_documents))
    if not validation:
        raise DataError(
            "{}={}: nothing is held out to be judged by: raise data.validation_fraction, or name "
            "data.validation_files or data.validation_split".format(*cfg.where())
        )
    text = blake2b("\0".join(validation).encode(), digest_size=16).hexdigest()
    if expected is not None and not expected.startswith(text):
        raise DataError(
            "{}={}: the text there is not what this run was started with; restore it, or choose another "
            "run_dir".format(*cfg.where())
        )
    if tokenizer is None:
        tokenizer = Tokenizer.train(head if cfg.format == "text" else map(spoken, head), cfg.vocab_size)
    return StreamedText(
        title=cfg.where()[1].strip("'"),
        fingerprint=f"{text}-{tokenizer.digest()}",
        tokenizer=tokenizer,
        validation=_packed([_Document(*_encode(text, cfg, tokenizer)) for text in validation], cfg),
        cfg=cfg,
        seed=context.seed,
    )


def _read_head(cfg: RowsConfig, num_train: int) -> tuple[list[str], list[str]]:
    """The first texts to train on, and the first held out."""
    num_validation = 0 if cfg.validation_is_given else cfg.validation_documents
    train: list[str] = []
    validation: list[str] = []
    for text in read_documents(open_rows(cfg), cfg):
        if len(train) >= num_train and len(validation) >= num_validation:
            break
        if text is None:
            continue
        if not cfg.validation_is_given and is_held_out(row_document(text), cfg.validation_fraction):
            validation.append(text)
        else:
            train.append(text)
    return train[:num_train], validation[:num_validation]


@dataclass(frozen=True)
class _Document:
    """One text as tokens; which are learned (None: all); where the dataset stood before it."""

    ids: np.ndarray
    learned: np.ndarray | None
    epoch: int = 0
    before: dict[str, Any] | None = None


class StreamedBatches:
    """Packed batches from a `datasets.IterableDataset`, without end; the Trainer resumes it by its state.

    Documents are read until they fill `data.shuffle_block` sequences, whose order then is shuffled, as (seed,
    number of the block) says. So the position is where the dataset stood before a block (its `state_dict`),
    and how many sequences of that block were given: few numbers, and after a resume the sequences are the
    same to the bit, in batches of any size. A batch may hold the end of one block and the start of the next.
    Held-out documents are passed over. An epoch follows the other within a block.
    """

    can_read_ahead = True

    def __init__(
        self,
        rows: Any,
        cfg: RowsConfig,
        tokenizer: Tokenizer,
        seed: int,
        batch_size: int,
        ahead: int,
        fingerprint: str | None = None,
    ):
        """`rows`: as `open_rows` gives them; `ahead`: batches read before they are asked for."""
        self.fingerprint = fingerprint
        self._rows, self._cfg, self._tokenizer, self._seed = rows, cfg, tokenizer, seed
        self._batch_size, self._ahead = batch_size, ahead
        self._place: dict[str, Any] = {"block": 0, "sequences": 0, "epoch": 0, "dataset": None, "used": 0}
        self._prefetched: Prefetched[tuple[Batch, dict[str, Any]]] | None = None

    def state_dict(self) -> dict[str, Any]:
        """The position after the last batch given, as JSON."""
        return copy.deepcopy(self._place)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a position that `state_dict` gave, with the next `iter`; the one before gives no more."""
        if state.keys() != self._place.keys():
            raise DataError(
                "the position of the stream was saved by an earlier tputrain, which counted it in batches: "
                "go on with that one, or begin anew in another run_dir"
            )
        self._stop_reading()
        self._place = copy.deepcopy(state)

    def __iter__(self) -> Iterator[Batch]:
        self._stop_reading()
        prefetched = Prefetched(self._walk(copy.deepcopy(self._place)), self._ahead)
        self._prefetched = prefetched
        try:
            for batch, place in prefetched:
                self._place = place
                yield batch
        finally:
            prefetched.close()

    def _stop_reading(self) -> None:
        """End the thread of an earlier position: two would move one dataset, and both read what is wrong."""
        if self._prefetched is not None:
            self._prefetched.wait_until_ended()
            self._prefetched = None

    def _walk(self, place: dict[str, Any]) -> Iterator[tuple[Batch, dict[str, Any]]]:
        """Batches from `place` on, each with the position after it."""
        begun: list[Batch] = []
        missing = self._batch_size
        for packed, start, following in self._blocks(place):
            order, first = epoch_order(self._seed, start["block"], packed.num_sequences), start["sequences"]
            while first < len(order):
                chosen = order[first : first + missing]
                begun.append(packed.batch_of(chosen))
                first, missing = first + len(chosen), missing - len(chosen)
                if missing == 0:
                    after = following if first == len(order) else start | {"sequences": first}
                    yield {name: torch.cat([each[name] for each in begun]) for name in begun[0]}, after
                    begun, missing = [], self._batch_size

    def _blocks(
        self, place: dict[str, Any]
    ) -> Iterator[tuple[PackedSequences, dict[str, Any], dict[str, Any]]]:
        """The sequences of each block from that of `place` on, the position in it, and that of the next."""
        documents = self._documents(place["epoch"], place["dataset"])
        size = self._cfg.shuffle_block * self._cfg.sequence_length
        pending: list[_Document] = []
        while True:
            # One token more than the block has: the label of its last.
            missing = size + 1 + place["used"] - sum(len(document.ids) for document in pending)
            while missing > 0:
                pending.append(next(documents))
                missing -= len(pending[-1].ids)
            packed = _packed(pending, self._cfg, place["used"], size + 1, self._seed)
            after, pending = _rest(pending, place["used"] + size)
            following = {"block": place["block"] + 1, "sequences": 0, **after}
            yield packed, place, following
            place = following

    def _documents(self, epoch: int, before: dict[str, Any] | None) -> Iterator[_Document]:
        """Every text to train on from a position of the dataset on (None: the start of the epoch)."""
        while True:
            self._rows.set_epoch(epoch)
            # None too: the dataset would begin where the state that it was given last says.
            self._rows.load_state_dict(copy.deepcopy(before))
            is_empty = before is None
            for text in read_documents(self._rows, self._cfg, is_from_start=before is None):
                after = self._rows.state_dict()
                if text is not None and not self._is_held_out(text):
                    is_empty = False
                    yield _Document(*_encode(text, self._cfg, self._tokenizer), epoch, before)
                before = after
            if is_empty:
                raise empty(self._cfg)
            epoch, before = epoch + 1, None

    def _is_held_out(self, text: str) -> bool:
        if self._cfg.validation_is_given:
            return False
        return is_held_out(row_document(text), self._cfg.validation_fraction)


def _encode(text: str, cfg: RowsConfig, tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray | None]:
    if cfg.format == "text":
        return np.array(tokenizer.encode_documents([text])[0], dtype=np.int64), None
    (ids,), (learned,) = encode_conversations([text], tokenizer)
    return np.array(ids, dtype=np.int64), learned


def _packed(
    documents: list[_Document], cfg: RowsConfig, used: int = 0, size: int | None = None, seed: int = 0
) -> PackedSequences:
    """`size` tokens of the documents (None: all), without the first `used`, as sequences."""
    stop = None if size is None else used + size
    tokens = np.concatenate([document.ids for document in documents])[used:stop]
    ends = np.cumsum([len(document.ids) for document in documents]) - used
    offsets = np.concatenate([[0], ends[ends < len(tokens)], [len(tokens)]])
    learned = None
    if cfg.format != "text":
        learned = np.concatenate([document.learned for document in documents])[used:stop]
    return PackedSequences(tokens, offsets, cfg.sequence_length, seed, "streamed", learned)


def _rest(documents: list[_Document], used: int) -> tuple[dict[str, Any], list[_Document]]:
    """The position after `used` tokens of the documents, and those that are not used up."""
    while used >= len(documents[0].ids):
        used -= len(documents[0].ids)
        documents = documents[1:]
    first = documents[0]
    return {"epoch": first.epoch, "dataset": first.before, "used": used}, documents
