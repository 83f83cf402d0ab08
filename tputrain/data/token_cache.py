"""The tokenizer and the token arrays of a corpus, made once and kept on disk."""

import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from time import perf_counter

import numpy as np

from tputrain.data.built_once import built_once
from tputrain.data.changed_files import record_files
from tputrain.data.config import TextConfig
from tputrain.data.conversations import encode_conversations, spoken
from tputrain.data.corpus import Corpus, Document, Totals, split
from tputrain.data.pretrained_tokenizer import load_tokenizer
from tputrain.data.token_writer import TokenWriter
from tputrain.data.tokenizer import Tokenizer
from tputrain.errors import in_words

_LAYOUT = 1  # raise when what an entry holds, or how it is made, changes
_DOCUMENTS_A_BATCH = 32
_LEARNED_FROM = 200  # megabytes of text that decide a vocabulary, about; more only takes longer
_CHARACTERS_A_BATCH = 2**20  # an encoding takes some 100 bytes a token


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


def known_totals(corpus: Corpus, cfg: TextConfig, announce: Callable[[str], None]) -> Totals:
    """What all documents add up to; they are not read again while their files stay as they are."""
    path = Path(cfg.cache_dir).expanduser() / f"totals-{_LAYOUT}-{corpus.stamp}.json"
    if corpus.stamp is not None:
        with suppress(OSError, ValueError, TypeError):  # not there, or damaged
            return Totals(**json.loads(path.read_text()))
    started = perf_counter()
    totals = corpus.survey.totals
    if (seconds := perf_counter() - started) > 5:
        announce(f"data: reading {totals.num_bytes / 1e6:,.0f} MB of text, once, took {seconds:.0f} s")
    if corpus.stamp is not None:
        with suppress(OSError):  # `tokenise` says so
            path.parent.mkdir(parents=True, exist_ok=True)
            unfinished = path.with_suffix(f".{os.getpid()}")
            unfinished.write_text(json.dumps(asdict(totals)))
            unfinished.rename(path)
    return totals


def tokenise(
    corpus: Corpus,
    totals: Totals,
    cfg: TextConfig,
    announce: Callable[[str], None],
    tokenizer: Tokenizer | None = None,
) -> TokenisedCorpus:
    """The corpus, which adds up to `totals`, as tokens of `tokenizer` (None: one that is trained on it), from
    the cache if it is there.

    Of the processes that do this at the same time one builds; the others wait for it.
    """
    cache = Path(cfg.cache_dir).expanduser()
    entry = cache / text_fingerprint(totals, cfg)
    cached = None if cfg.tokenizer is not None else _load_or_remove(entry, announce)
    if tokenizer is not None and (cached is None or cached.tokenizer.digest() != tokenizer.digest()):
        # Beside the entry of those who train theirs, who must not get somebody else's.
        entry = cache / f"{entry.name}-{tokenizer.digest()}"
        cached = _load_or_remove(entry, announce)
    if cached is not None:
        return cached

    def build(built: Path) -> None:
        built.mkdir()
        _build(corpus, totals.num_bytes / 1e6, cfg, built, announce, tokenizer)
        record_files(cfg.files_behind(), built)

    built_once(entry, "tokenizer and tokens", announce, cfg.cache_dir, build)
    return _load(entry)


def entries_of(text: str, cfg: TextConfig) -> list[Path]:
    """Where the tokens of the text with this fingerprint are kept, by whatever tokenizer."""
    return sorted(Path(cfg.cache_dir).expanduser().glob(f"{text}*"))


def text_fingerprint(totals: Totals, cfg: TextConfig) -> str:
    """Names the text and all that decides how it is cut, but for the tokenizer itself."""
    # What came later is named only where it is used: older runs go on with the name that they know.
    later = [cfg.format] if cfg.format != "text" else []
    choices = json.dumps([_LAYOUT, cfg.vocab_size, cfg.validation_fraction, *later])
    return blake2b(bytes.fromhex(totals.digest) + choices.encode(), digest_size=16).hexdigest()


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
    corpus: Corpus,
    megabytes: float,
    cfg: TextConfig,
    built: Path,
    announce: Callable[[str], None],
    tokenizer: Tokenizer | None,
) -> None:
    started = perf_counter()
    # The rates are those of one slow core; small texts need no word.
    if megabytes > 2 and tokenizer is None:
        seconds = min(megabytes, _LEARNED_FROM) * 0.9
        announce(f"tokenizer: learning from {megabytes:.1f} MB of text, once (about {seconds:.0f} s)")
    elif megabytes > 2:
        announce(f"tokenizer: reading {megabytes:.1f} MB of text with the run's own")
    is_text = cfg.format == "text"
    parts = partial(split, corpus, cfg.validation_fraction)
    if tokenizer is None:
        tokenizer = learn_tokenizer(training_texts(corpus, cfg), megabytes, cfg.vocab_size)
    tokenizer.save(built)
    dtype = np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32
    with (
        TokenWriter(built / "train", dtype, has_learned=not is_text) as train,
        TokenWriter(built / "validation", dtype, has_learned=not is_text) as validation,
    ):
        for documents in _batches(parts()):
            texts = [document.text for document, _ in documents]
            encode = _encode_texts if is_text else encode_conversations
            for (_, is_validation), ids, learned in zip(documents, *encode(texts, tokenizer), strict=True):
                (validation if is_validation else train).write(ids, learned)
    lengths = {"train": train.num_tokens, "validation": validation.num_tokens}
    (built / "entry.json").write_text(json.dumps({"tokens": lengths, "learned": not is_text}) + "\n")
    if megabytes > 2:
        announce(f"tokenizer: {train.num_tokens:,} tokens to train on, took {perf_counter() - started:.1f} s")


def learn_tokenizer(texts: Iterable[str], megabytes: float, vocab_size: int) -> Tokenizer:
    """A byte-level BPE of the texts, which are so large together; of much text, of a part of it, evenly."""
    return Tokenizer.train(islice(texts, 0, None, math.ceil(megabytes / _LEARNED_FROM)), vocab_size)


def training_texts(corpus: Corpus, cfg: TextConfig) -> Iterator[str]:
    """What the documents of a corpus that are trained on say."""
    documents = split(corpus, cfg.validation_fraction)
    texts = (document.text for document, is_validation in documents if not is_validation)
    return texts if cfg.format == "text" else map(spoken, texts)


def _encode_texts(texts: Sequence[str], tokenizer: Tokenizer) -> tuple[list[Sequence[int]], list[None]]:
    return tokenizer.encode_documents(texts), [None] * len(texts)


def _batches(documents: Iterable[tuple[Document, bool]]) -> Iterator[list[tuple[Document, bool]]]:
    batch, num_characters = [], 0
    for document, is_validation in documents:
        batch.append((document, is_validation))
        num_characters += len(document.text)
        if len(batch) == _DOCUMENTS_A_BATCH or num_characters >= _CHARACTERS_A_BATCH:
            yield batch
            batch, num_characters = [], 0
    if batch:
        yield batch


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
