"""The tokenizer and the token arrays of a corpus, made once and kept on disk."""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from time import perf_counter

import numpy as np

from tputrain.data.built_once import built_once
from tputrain.data.config import DataConfig, DataError
from tputrain.data.conversations import encode_conversations, spoken
from tputrain.data.pretrained_tokenizer import load_tokenizer
from tputrain.data.sources import Corpus, Document, split
from tputrain.data.tokenizer import Tokenizer
from tputrain.errors import in_words

_LAYOUT = 1  # raise when what an entry holds, or how it is made, changes
_DOCUMENTS_A_BATCH = 32


@dataclass(frozen=True)
class TokenisedPart:
    """Documents end to end: token ids (uint16 or uint32), where each starts (int64), the end last."""

    tokens: np.ndarray
    offsets: np.ndarray
    learned: np.ndarray | None = None
    """Which tokens are learned (bool); None: all."""


@dataclass(frozen=True)
class TokenisedCorpus:
    """A corpus as tokens, memory-mapped."""

    tokenizer: Tokenizer
    train: TokenisedPart
    validation: TokenisedPart


def tokenise(
    corpus: Corpus, cfg: DataConfig, announce: Callable[[str], None], tokenizer: Tokenizer | None = None
) -> TokenisedCorpus:
    """The corpus as tokens of `tokenizer` (None: one that is trained on it), from the cache if it is there.

    Of the processes that do this at the same time one builds; the others wait for it.
    """
    cache = Path(cfg.cache_dir).expanduser()
    entry = cache / text_fingerprint(corpus, cfg)
    cached = None if cfg.tokenizer is not None else _load_or_remove(entry, announce)
    if tokenizer is not None and (cached is None or cached.tokenizer.digest() != tokenizer.digest()):
        # Beside the entry of those who train theirs, who must not get somebody else's.
        entry = cache / f"{entry.name}-{tokenizer.digest()}"
        cached = _load_or_remove(entry, announce)
    if cached is not None:
        return cached
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with built_once(entry, "tokenizer and tokens", announce):
            if not entry.exists():
                _build_in_place(corpus, cfg, entry, announce, tokenizer)
    except OSError as error:
        raise DataError(
            f"data.cache_dir={cfg.cache_dir}: cannot write there ({error.strerror}): name another directory"
        ) from error
    return _load(entry)


def _build_in_place(
    corpus: Corpus, cfg: DataConfig, entry: Path, announce: Callable[[str], None], tokenizer: Tokenizer | None
) -> None:
    with tempfile.TemporaryDirectory(prefix="building-", dir=entry.parent) as workspace:
        built = Path(workspace) / entry.name
        built.mkdir()
        _build(corpus, cfg, built, announce, tokenizer)
        _publish(built, entry)


def text_fingerprint(corpus: Corpus, cfg: DataConfig) -> str:
    """Names the text and all that decides how it is cut, but for the tokenizer itself."""
    # What came later is named only where it is used: older runs go on with the name that they know.
    later = [cfg.format] if cfg.format != "text" else []
    choices = json.dumps([_LAYOUT, cfg.vocab_size, cfg.validation_fraction, *later])
    return blake2b(corpus.digest() + choices.encode(), digest_size=16).hexdigest()


def _load_or_remove(entry: Path, announce: Callable[[str], None]) -> TokenisedCorpus | None:
    if not entry.exists():
        return None
    try:
        return _load(entry)
    except (OSError, ValueError, KeyError) as error:
        announce(f"cached tokens in {entry} are damaged ({in_words(error)}): making them again")
        shutil.rmtree(entry, ignore_errors=True)
        return None


def _build(
    corpus: Corpus, cfg: DataConfig, built: Path, announce: Callable[[str], None], tokenizer: Tokenizer | None
) -> None:
    megabytes = corpus.num_bytes / 1e6
    started = perf_counter()
    # The rates are those of one slow core; small texts need no word.
    if megabytes > 2 and tokenizer is None:
        announce(f"tokenizer: learning from {megabytes:.1f} MB of text, once (about {megabytes * 0.9:.0f} s)")
    elif megabytes > 2:
        announce(f"tokenizer: reading {megabytes:.1f} MB of text with the run's own")
    train, validation = split(corpus, cfg.validation_fraction)
    if tokenizer is None:
        texts = (document.text for document in train)
        tokenizer = Tokenizer.train(texts if cfg.format == "text" else map(spoken, texts), cfg.vocab_size)
    tokenizer.save(built)
    lengths = {}
    for name, documents in (("train", train), ("validation", validation)):
        write = _write_tokens if cfg.format == "text" else _write_conversations
        lengths[name] = write(documents, tokenizer, built / name)
    (built / "entry.json").write_text(json.dumps({"tokens": lengths, "learned": cfg.format != "text"}) + "\n")
    if megabytes > 2:
        announce(f"tokenizer: {lengths['train']:,} tokens to train on, took {perf_counter() - started:.1f} s")


def _write_tokens(documents: Sequence[Document], tokenizer: Tokenizer, stem: Path) -> int:
    offsets, pieces = [0], []
    for texts in _batches_of_text(documents):
        for ids in tokenizer.encode_documents(texts):
            pieces.append(np.array(ids, dtype=_token_dtype(tokenizer)))
            offsets.append(offsets[-1] + len(ids))
    _save_tokens(stem, pieces, offsets, tokenizer)
    return offsets[-1]


def _write_conversations(documents: Sequence[Document], tokenizer: Tokenizer, stem: Path) -> int:
    offsets, pieces, learned = [0], [], []
    for texts in _batches_of_text(documents):
        for ids, answers in zip(*encode_conversations(texts, tokenizer), strict=True):
            pieces.append(np.array(ids, dtype=_token_dtype(tokenizer)))
            learned.append(answers)
            offsets.append(offsets[-1] + len(ids))
    np.save(f"{stem}_learned.npy", np.concatenate(learned) if learned else np.empty(0, bool))
    _save_tokens(stem, pieces, offsets, tokenizer)
    return offsets[-1]


def _token_dtype(tokenizer: Tokenizer) -> type[np.unsignedinteger]:
    return np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32


def _save_tokens(stem: Path, pieces: list[np.ndarray], offsets: list[int], tokenizer: Tokenizer) -> None:
    np.save(f"{stem}.npy", np.concatenate(pieces) if pieces else np.empty(0, _token_dtype(tokenizer)))
    np.save(f"{stem}_offsets.npy", np.array(offsets, dtype=np.int64))


def _batches_of_text(documents: Sequence[Document]) -> Iterator[list[str]]:
    for start in range(0, len(documents), _DOCUMENTS_A_BATCH):
        yield [document.text for document in documents[start : start + _DOCUMENTS_A_BATCH]]


def _publish(built: Path, entry: Path) -> None:
    for path in built.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    try:
        built.rename(entry)
    except OSError:
        if not entry.exists():  # else another process was first, with the same content
            raise


def _load(entry: Path) -> TokenisedCorpus:
    described = json.loads((entry / "entry.json").read_text())
    lengths, holds_learned = described["tokens"], described.get("learned", False)

    def part(name: str) -> TokenisedPart:
        offsets = np.load(entry / f"{name}_offsets.npy")
        # An empty file cannot be mapped, and an empty part needs none.
        tokens = np.load(entry / f"{name}.npy", mmap_mode="r" if lengths[name] else None)
        if not len(tokens) == offsets[-1] == lengths[name]:
            raise ValueError(f"{name}.npy holds {len(tokens)} tokens, {lengths[name]} expected")
        learned = entry / f"{name}_learned.npy"
        return TokenisedPart(tokens, offsets, np.load(learned) if holds_learned else None)

    train, validation = part("train"), part("validation")
    return TokenisedCorpus(load_tokenizer(entry), train, validation)
