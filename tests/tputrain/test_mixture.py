"""Several sources in one run: shares, order, tokenizer, what a run goes on with, and what is refused."""

import json
import pickle
import random

import numpy as np
import pytest

from tputrain import UserError, load_recipe
from tputrain.data import DataConfig, DataError, PackedSequences
from tputrain.data.mixture import WeightedSequences, shares_of

WORDS = ["def", "return", "class", "self", "import", "for", "in", "range", "print", "value", "number", "text"]


@pytest.fixture(autouse=True)
def texts(tmp_path, monkeypatch):
    """Rows about animals, files about stones."""
    monkeypatch.chdir(tmp_path)
    rng = random.Random(0)

    def prose(word, count):
        return " ".join([word] + [rng.choice(WORDS) for _ in range(count)])

    (tmp_path / "rows.jsonl").write_text("".join(f'{{"text": "{prose("zebra", 60)}"}}\n' for _ in range(60)))
    for number in range(30):
        (tmp_path / f"stone{number}.txt").write_text(prose("quartz", 200))


def mixture(weights=(3, 1), **changes):
    sources = {
        "animals": {"source": "jsonl", "files": "rows.jsonl"},
        "stones": {"files": "stone*.txt"},
    }
    for settings, weight in zip(sources.values(), weights, strict=True):
        settings |= {} if weight is None else {"weight": weight}
    common = {"vocab_size": 300, "sequence_length": 16, "cache_dir": "cache"}
    return DataConfig(source="mixture", **(common | {"sources": sources} | changes))


def packed(number, count):
    """`count` sequences of 4 tokens, all of them `number`."""
    return PackedSequences(np.full(4 * count, number), np.array([0, 4 * count]), 4, 0, "train")


def test_every_1024_sequences_have_the_shares_that_were_asked_for():
    mixed = WeightedSequences(
        [packed(0, 100), packed(1, 100), packed(2, 7)], shares_of({"a": 5, "b": 4, "c": 1}), seed=3
    )
    ids = np.concatenate([mixed.batch_at(step, 0, 64)["input_ids"][:, 0].numpy() for step in range(48)])
    counts = [np.bincount(block).tolist() for block in ids.reshape(3, 1024)]
    assert counts == [[512, 410, 102]] * 3
    assert np.bincount(ids[:64], minlength=3).min() > 0  # well mixed inside


def test_a_source_goes_through_epochs_of_its_own_and_equal_ones_in_other_orders():
    mixed = WeightedSequences([packed(0, 256), packed(1, 256)], shares_of({"a": 1, "b": 1}), seed=0)
    drawn = mixed.at(np.arange(1024))
    first, second = drawn[drawn < 256], drawn[drawn >= 256] - 256
    for order in (first, second):
        assert sorted(order) == sorted([*range(256)] * 2)
    assert not np.array_equal(first, second)


def test_the_order_is_a_function_of_the_step_alone_whatever_the_size_of_batches():
    data = mixture().build(seed=1, announce=lambda line: None)
    whole = data.training_batches(8, 1).batch_at(5, 0)["input_ids"]
    halves = data.training_batches(4, 2)
    assert whole.tolist() == [
        row for micro in (0, 1) for row in halves.batch_at(5, micro)["input_ids"].tolist()
    ]
    again = mixture().build(seed=1, announce=lambda line: None)
    assert again.fingerprint == data.fingerprint
    assert again.training_batches(8, 1).batch_at(5, 0)["input_ids"].tolist() == whole.tolist()


def test_all_sources_share_a_tokenizer_that_was_learned_from_all_of_them_once(capsys):
    lines = []
    data = mixture(vocab_size=400).build(seed=0, announce=lines.append)
    for word in ("zebra", "quartz"):
        assert len(data.tokenizer.encode(word)) < len(word) / 2
    assert len([line for line in lines if "learning" in line]) == 1
    lines.clear()
    mixture(vocab_size=400).build(seed=0, announce=lines.append)
    assert not lines
    described = data.describe()
    assert described[1].startswith("  75.0% animals: rows.jsonl, ")
    assert described[2].startswith("  25.0% stones: stone*.txt, ")


def test_of_many_sources_each_keeps_its_order_at_hand():
    count = 40
    parts = [packed(number, 3 * number + 5) for number in range(count)]
    mixed = WeightedSequences(parts, shares_of(dict.fromkeys(map(str, range(count)), 1)), seed=0)
    drawn = mixed.at(np.arange(2048))
    made = mixed._orders.cache_info().misses
    assert np.array_equal(pickle.loads(pickle.dumps(mixed)).at(np.arange(2048)), drawn)
    mixed.at(np.arange(2000, 2048))
    assert mixed._orders.cache_info().misses == made


def test_what_is_judged_by_comes_from_all_sources_and_each_sequence_once():
    data = mixture().build(seed=0, announce=lambda line: None)
    batches = list(data.evaluation_batches(4))
    labels = sum(int((batch["labels"] != -100).sum()) for batch in batches)
    parts = data.validation.parts
    alone = [batch for part in parts for batch in part.eval_batches(4)]
    assert labels == sum(int((batch["labels"] != -100).sum()) for batch in alone)
    assert all(part.num_sequences > 0 for part in parts)


def test_without_weights_each_source_counts_by_its_size():
    data = mixture(weights=(None, None)).build(seed=0, announce=lambda line: None)
    count = data.train.num_sequences
    drawn = data.train.at(np.arange(count))
    assert sorted(drawn.tolist()) == list(range(count))


@pytest.mark.parametrize("layout", ["packed", "best_fit"])
def test_layouts_of_one_length_can_be_mixed(layout):
    data = mixture(layout=layout).build(seed=0, announce=lambda line: None)
    assert data.training_batches(4, 1).batch_at(0, 0)["input_ids"].shape == (4, 16)


def test_a_run_goes_on_with_the_same_mixture_only(tmp_path):
    data = mixture().build(seed=0, announce=lambda line: None)
    options = {"seed": 0, "announce": lambda line: None, "tokenizer": data.tokenizer}
    mixture().build(expected=data.fingerprint, **options)
    with pytest.raises(DataError, match="animals, stones: this is not the mixture"):
        mixture(weights=(1, 1)).build(expected=data.fingerprint, **options)
    (tmp_path / "stone0.txt").write_text("something else")
    with pytest.raises(
        DataError, match=r"data\.sources\.stones\.files='stone\*\.txt': the text there is not"
    ):
        mixture().build(expected=data.fingerprint, **options)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sources": {}}, "data.sources={}: expected several"),
        ({"layout": "padded"}, "data.layout=padded: expected one of"),
        ({"weights": (1, None)}, "data.sources.stones.weight=null: expected a number, as the other"),
        ({"weights": (1, 0)}, "data.sources.stones.weight=0: expected a number above 0"),
        ({"weights": (1e6, 1)}, "data.sources.stones.weight=1: expected a share of at least 1 in 1024"),
    ],
)
def test_impossible_mixtures_are_refused_before_any_work(changes, message):
    with pytest.raises(UserError) as caught:
        mixture(**changes)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"file": "x"}, "data.sources.b.file=x: unknown key; nearest known key: files"),
        ({"weihgt": 2}, "data.sources.b.weihgt=2: unknown key; nearest known key: weight"),
        ({"zz": 2}, "data.sources.b.zz=2: unknown key; nearest known key: none resembles it (weight, source"),
        ({"source": "jsonl"}, "data.sources.b.files=null: expected files to read"),
        ({"source": "jsnl"}, "data.sources.b.source=jsnl: expected one of"),
        ({"source": "digits"}, "data.sources.b.source=digits: expected a source of text"),
        ({"source": "text", "name": "x"}, "data.sources.b.name=x: expected nothing with"),
        ({"sequence_length": 8}, "data.sources.b.sequence_length=8: expected nothing, all sources share"),
        ({"source": "jsonl", "files": 5}, "data.sources.b.files=5: expected text"),
        (
            {"source": "jsonl", "files": "x", "streaming": True},
            "data.sources.b.streaming=true: expected false",
        ),
        ("x.txt", "data.sources.b=x.txt: expected the settings of a source"),
    ],
)
def test_a_mistake_in_a_source_is_one_line_that_names_it(settings, message):
    with pytest.raises(UserError) as caught:
        DataConfig(source="mixture", sources={"a": {"files": "stone*.txt"}, "b": settings})
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_a_recipe_names_sources_and_the_command_line_a_weight(tmp_path):
    (tmp_path / "mixed.yaml").write_text(
        "include: [model/llama-5m, optim/adamw]\n"
        "data:\n  source: mixture\n  vocab_size: 300\n  sequence_length: 16\n  cache_dir: cache\n  sources:\n"
        "    animals: {source: jsonl, files: rows.jsonl, weight: 3}\n"
        "    stones: {files: 'stone*.txt', weight: 1}\n"
        "batch: {tokens: 64, sequences: 4}\ntrainer: {steps: 2}\n"
    )
    cfg = load_recipe("mixed.yaml", "data.sources.stones.weight=3").cfg
    assert cfg.data.shares.tolist() == [512, 512]
    json.dumps(cfg.data.sources)
