"""Several sources of text in one run, each with its share of the sequences."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, lru_cache
from hashlib import blake2b
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tputrain.config_checks import expect, expect_types, nearest
from tputrain.data.built_once import built_once
from tputrain.data.config import BuildContext, Data, DataConfig, DataError, TextConfig
from tputrain.data.pretrained_tokenizer import find_tokenizer, load_tokenizer
from tputrain.data.shuffled import Batch, ShuffledSequences, epoch_order, shuffled
from tputrain.data.text import TextData, build_data
from tputrain.data.token_cache import known_totals, learn_tokenizer, text_fingerprint, training_texts
from tputrain.data.tokenizer import Tokenizer
from tputrain.errors import UserError
from tputrain.kinds import keys_of

_BLOCK = 1024
"""Sequences in which every source has its share to the sequence."""
_OF_BLOCKS = 2**62
"""Added to a block's number: its order is not that of an epoch."""
_SHARED = {entry.name for entry in fields(TextConfig)} - {"source"}
_LAYOUTS = ("packed", "best_fit")


@dataclass(frozen=True)
class MixtureConfig(TextConfig, names=("mixture",)):
    """Several sources, each with a weight; all that they share is set once."""

    source: str = "mixture"
    sources: dict[str, Any] = field(default_factory=dict)
    """By a name of yours: the settings of a source, as below `data`, and its `weight`, its share of what is
    trained on in relation to the other weights. Without weights, each counts by its size."""

    def __post_init__(self) -> None:
        super().__post_init__()
        example = "several, such as {web: {source: jsonl, files: 'web/*.jsonl', weight: 3}, code: {...}}"
        expect(len(self.sources) > 1, "data.sources", self.sources or "{}", example)
        expect(
            self.layout in _LAYOUTS, "data.layout", self.layout, f"one of {_LAYOUTS} with data.source=mixture"
        )
        for name, cfg in self.parts.items():
            key = f"data.sources.{name}"
            expect(
                not getattr(cfg, "streaming", False),
                f"{key}.streaming",
                "true",
                "false: a mixture is no stream",
            )
        _ = self.shares  # raises where they are none

    @property
    def has_conversations(self) -> bool:
        return any(part.has_conversations for part in self.parts.values())

    @cached_property
    def parts(self) -> dict[str, TextConfig]:
        """The configuration of each source."""
        return {name: self._part(name, settings) for name, settings in self.sources.items()}

    def _part(self, name: str, settings: Any) -> TextConfig:
        key = f"data.sources.{name}"
        expect(isinstance(settings, dict), key, settings, "the settings of a source, such as {source: text}")
        own = {option: value for option, value in settings.items() if option != "weight"}
        shared = {option: getattr(self, option) for option in _SHARED}
        for option in own:
            if option in shared:
                raise DataError(
                    f"{key}.{option}={own[option]}: expected nothing, all sources share data.{option}"
                )
        with _named(name):
            kind = DataConfig.kind_of(own.get("source", DataConfig.source))
            expect(
                issubclass(kind, TextConfig) and kind is not MixtureConfig,
                "data.source",
                own.get("source"),
                "a source of text",
            )
            for option in own:
                if option not in keys_of(kind) and not DataConfig.owners(option):
                    known = ["weight", *(key for key in keys_of(kind) if key not in shared)]
                    hint = nearest(option, known) or f"none resembles it ({', '.join(known)})"
                    raise DataError(f"data.{option}={own[option]}: unknown key; nearest known key: {hint}")
            part = DataConfig(**(shared | own))
            expect_types(part, "data.")
            return part  # type: ignore[return-value]

    @property
    def shares(self) -> np.ndarray | None:
        """How many of `_BLOCK` sequences each source has (int64); None: each counts by its size."""
        weights = {
            name: settings["weight"] for name, settings in self.sources.items() if "weight" in settings
        }
        for name, weight in weights.items():
            is_number = (
                isinstance(weight, int | float) and not isinstance(weight, bool) and 0 < weight < math.inf
            )
            expect(is_number, f"data.sources.{name}.weight", weight, "a number above 0")
        if not weights:
            return None
        for name in self.sources:
            expect(
                name in weights,
                f"data.sources.{name}.weight",
                None,
                "a number, as the other sources have one",
            )
        return shares_of(weights)

    def where(self, held_out: bool = False) -> tuple[str, str]:
        return "data.sources", ", ".join(self.sources)

    def files_behind(self) -> list[Path]:
        return [path for cfg in self.parts.values() for path in cfg.files_behind()]

    def _build(self, context: BuildContext) -> Data:
        return _build_mixture(self, context)


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Names the source in an error about its settings."""
    try:
        yield
    except UserError as error:
        text = str(error)
        raise type(error)(text.replace("data.", f"data.sources.{name}.", 1)) from error


class JoinedSequences(ShuffledSequences):
    """The sequences of several sources as one, in one order: each source counts by its size."""

    def __init__(self, parts: Sequence[ShuffledSequences], seed: int):
        self.parts, self.seed = parts, seed
        self.sequence_length = parts[0].sequence_length
        self.sizes = np.array([part.num_sequences for part in parts])
        self.num_sequences = int(self.sizes.sum())
        self.num_tokens = sum(part.num_tokens for part in parts)
        self.num_documents = sum(part.num_documents for part in parts)
        self.first = np.concatenate([[0], self.sizes.cumsum()])
        """The number of each source's first sequence, and how many there are."""

    def batch_of(self, indices: np.ndarray) -> Batch:
        owners = np.searchsorted(self.first, indices, side="right") - 1
        batch: Batch = {}
        for number in np.unique(owners):
            rows = np.flatnonzero(owners == number)
            for name, values in self.parts[number].batch_of(indices[rows] - self.first[number]).items():
                whole = batch.setdefault(name, values.new_empty((len(indices), self.sequence_length)))
                whole[torch.from_numpy(rows)] = values
        return batch


class WeightedSequences(JoinedSequences):
    """The sequences of several sources, each with its share of what is trained on.

    Of every 1,024 sequences each source has `shares` (int64, their sum is 1,024), in an order that (seed,
    step) decides. A source goes through epochs of its own: in each, every sequence comes once. An epoch of
    the mixture is as many sequences as there are in all sources.
    """

    def __init__(self, parts: Sequence[ShuffledSequences], shares: np.ndarray, seed: int):
        super().__init__(parts, seed)
        # However many sources there are, each has the orders of its own epochs at hand.
        self._orders = lru_cache(maxsize=2 * len(parts))(epoch_order.__wrapped__)
        self._begins = np.concatenate([[0], shares.cumsum()])  # of each source's places in a block
        self._shares = shares

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_orders"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._orders = lru_cache(maxsize=2 * len(self.parts))(epoch_order.__wrapped__)

    def at(self, places: np.ndarray) -> np.ndarray:
        blocks, within = np.divmod(places, _BLOCK)
        items = np.empty_like(places)
        for block in np.unique(blocks):
            chosen = blocks == block
            items[chosen] = epoch_order(self.seed, int(block) + _OF_BLOCKS, _BLOCK)[within[chosen]]
        owners = np.searchsorted(self._begins, items, side="right") - 1
        indices = np.empty_like(places)
        for number, part in enumerate(self.parts):
            chosen = owners == number
            drawn = blocks[chosen] * self._shares[number] + items[chosen] - self._begins[number]
            # Sources of one size must not go through their sequences alike.
            order = self.seed + (number << 40)
            indices[chosen] = self.first[number] + shuffled(order, drawn, part.num_sequences, self._orders)
        return indices


def shares_of(weights: dict[str, float]) -> np.ndarray:
    """How many of `_BLOCK` sequences each source has (int64): the largest remainders are rounded up."""
    exact = np.array(list(weights.values())) / sum(weights.values()) * _BLOCK
    shares = np.floor(exact).astype(np.int64)
    shares[np.argsort(shares - exact, kind="stable")[: _BLOCK - shares.sum()]] += 1
    for (name, weight), share in zip(weights.items(), shares, strict=True):
        least = f"a share of at least 1 in {_BLOCK} sequences"
        expect(share > 0, f"data.sources.{name}.weight", weight, least)
    return shares


@dataclass(frozen=True)
class MixtureData(TextData):
    """Text of several sources."""

    parts: tuple[str, ...] = ()
    """A line for each source."""

    def describe(self) -> list[str]:
        """A few lines for people."""
        first, *rest = super().describe()
        return [first, *self.parts, *rest]


def _build_mixture(cfg: MixtureConfig, context: BuildContext) -> MixtureData:
    seed, tokenizer, expected = context.seed, context.tokenizer, context.expected
    if tokenizer is None:
        tokenizer = (
            find_tokenizer(cfg.tokenizer)
            if cfg.tokenizer is not None
            else _common_tokenizer(cfg, context.announce)
        )
    begun_with = (
        [None] * len(cfg.parts)
        if expected is None
        else [each.partition("@")[0] for each in expected.split("+")]
    )
    if len(begun_with) != len(cfg.parts):
        raise _other_mixture(cfg)
    built: dict[str, TextData] = {}
    for (name, part), known in zip(cfg.parts.items(), begun_with, strict=True):
        with _named(name):
            built[name] = build_data(part, replace(context, tokenizer=tokenizer, expected=known))
    parts = [data.train for data in built.values()]
    joined = JoinedSequences(parts, seed)
    shares = cfg.shares
    train = joined if shares is None else WeightedSequences(joined.parts, shares, seed)
    counts = joined.sizes if shares is None else shares
    names = [data.fingerprint for data in built.values()]
    fingerprint = "+".join(names if shares is None else [f"{name}@{n}" for name, n in zip(names, shares)])
    if expected is not None and fingerprint != expected:
        raise _other_mixture(cfg)
    return MixtureData(
        title=f"{len(built)} sources",
        unit="document",
        num_files=sum(data.num_files for data in built.values()),
        num_bytes=sum(data.num_bytes for data in built.values()),
        fingerprint=fingerprint,
        tokenizer=tokenizer,
        train=train,
        validation=JoinedSequences([data.validation for data in built.values()], seed),
        num_workers=cfg.workers,
        parts=tuple(
            f"  {count / counts.sum():.1%} {name}: {data.title}, {data.train.num_sequences:,} sequences"
            for (name, data), count in zip(built.items(), counts, strict=True)
        ),
    )


def _common_tokenizer(cfg: MixtureConfig, announce: Callable[[str], None]) -> Tokenizer:
    """A vocabulary of all sources, learned once."""
    corpora, megabytes, names = [], 0.0, []
    for name, part in cfg.parts.items():
        with _named(name):
            corpora.append((part.corpus(), part))
            totals = known_totals(corpora[-1][0], part, announce)
        megabytes += totals.num_bytes / 1e6
        names.append(text_fingerprint(totals, part))
    entry = (
        Path(cfg.cache_dir).expanduser()
        / f"mixture-{blake2b(' '.join(names).encode(), digest_size=16).hexdigest()}"
    )

    def build(built: Path) -> None:
        announce(f"tokenizer: learning from {megabytes:.1f} MB of text, once")
        texts = chain.from_iterable(training_texts(corpus, part) for corpus, part in corpora)
        built.mkdir()
        learn_tokenizer(texts, megabytes, cfg.vocab_size).save(built)

    built_once(entry, "tokenizer", announce, cfg.cache_dir, build)
    return load_tokenizer(entry)


def _other_mixture(cfg: MixtureConfig) -> DataError:
    return DataError(
        f"data.sources={', '.join(cfg.sources)}: this is not the mixture that the run was started with; "
        "restore its sources and weights, or choose another run_dir"
    )
