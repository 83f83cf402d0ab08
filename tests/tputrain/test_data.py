"""From text to sequences: sources, split, tokenizer, cache, and what the user is told when it cannot work."""

import json
import os
import random
import re
import subprocess
import sys
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tputrain.data import DataConfig, DataError, Tokenizer
from tputrain.data.corpus import Corpus, Document, split
from tputrain.data.sources import standard_library
from tputrain.data.token_cache import known_totals, tokenise
from tputrain.data.tokenizer import pieces_of

WORDS = [
    "def",
    "return",
    "class",
    "self",
    "import",
    "for",
    "in",
    "range",
    "print",
    "value",
    "None",
    "True",
    "number",
    "text",
    "line",
    "of",
    "the",
    "and",
]


def prose(seed: int, words: int) -> str:
    rng = random.Random(seed)
    return " ".join(rng.choice(WORDS) + ("\n" if rng.random() < 0.1 else "") for _ in range(words))


@pytest.fixture(autouse=True)
def notes(tmp_path, monkeypatch):
    """A directory to be in, with sixty files of text in notes/."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "notes"
    folder.mkdir()
    for number in range(60):
        (folder / f"{number:02}.txt").write_text(prose(number, 200))
    return folder


def config(**changes) -> DataConfig:
    return DataConfig(
        **{"files": "notes/*.txt", "sequence_length": 16, "vocab_size": 300, "cache_dir": "cache", **changes}
    )


def build(seed=0, **changes):
    return config(**changes).build(seed, announce=lambda line: None)


def test_the_users_own_files_become_sequences():
    data = build()
    assert data.num_files == 60
    assert data.tokenizer.vocab_size == 300
    assert data.train.num_sequences > 10 * data.validation.num_sequences > 0
    num_tokens = data.train.num_tokens + data.validation.num_tokens
    (said,) = re.findall(r"about ([\d.]+) bytes of text per token", data.describe()[1])
    assert float(said) == pytest.approx(data.num_bytes / num_tokens, rel=0.2)  # of 64 sequences
    assert 1 < data.num_bytes / num_tokens < 8
    assert any("notes/*.txt, 60 files" in line for line in data.describe())


@pytest.mark.parametrize(("words", "size"), [(300, r"1\.5\d? kB"), (60_000, r"3\d\d kB")])
def test_the_size_of_little_text_is_told_too(notes, words, size):
    (notes / "one.txt").write_text(prose(1, words))
    assert re.search(f"notes/one.txt, 1 file, {size}$", build(files="notes/one.txt").describe()[0])


def test_a_corpus_is_read_when_it_is_looked_at(notes):
    corpus = config().corpus()
    (notes / "00.txt").write_text("another text")
    assert "another text" in [document.text for document in corpus.documents]


class ManyDocuments:
    def __iter__(self):
        return (Document(f"{number}.txt", " value" * 40_000) for number in range(60))


def test_text_may_be_larger_than_memory(tmp_path):
    tracemalloc.start()
    totals = known_totals(corpus := Corpus("many", ManyDocuments()), config(), print)
    tokenizer = Tokenizer.train([" value" * 9], 300)
    tokenised = tokenise(corpus, totals, config(), print, tokenizer)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (totals.num_bytes, totals.num_documents) == (14_400_000, 60)
    assert len(tokenised.train.tokens) > 2_000_000
    assert peak < 12_000_000


def test_files_that_stay_as_they_are_are_read_once(notes, monkeypatch):
    long_ago = time.time() - 60
    for path in notes.iterdir():
        os.utime(path, (long_ago, long_ago))
    first = build()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", pytest.fail)
        again = build()
    assert again.fingerprint == first.fingerprint
    assert again.describe() == first.describe()
    (notes / "00.txt").write_text("another text")
    assert build().fingerprint != first.fingerprint


@pytest.mark.parametrize("longest", [1, 7, 100])
def test_pieces_of_a_long_text_give_the_tokens_of_the_whole(longest, monkeypatch):
    text = "one  two\n\n\n  three\n four\nfive\r\nsix 7's\n" * 5 + "\n\nlast"
    tokenizer = Tokenizer.train([text], 290)
    (whole,) = tokenizer.encode_documents([text])
    monkeypatch.setattr("tputrain.data.tokenizer._LONGEST_PIECE", longest)
    assert len(list(pieces_of(text, longest))) > 1
    (pieces,) = tokenizer.encode_documents([text])
    assert list(pieces) == whole


def test_a_document_is_packed_whole_between_end_of_text_tokens(notes):
    data = build()
    ids = data.train.batch_of(np.arange(data.train.num_sequences))["input_ids"].flatten().tolist()
    end = data.tokenizer.end_of_text_id
    assert ids[0] == end
    first_document = ids[1 : ids.index(end, 1)]
    assert data.tokenizer.decode(first_document) in {path.read_text() for path in notes.iterdir()}


def divided(corpus: Corpus, validation_fraction: float) -> tuple[list[Document], list[Document]]:
    parts = list(split(corpus, validation_fraction))
    return [d for d, held_out in parts if not held_out], [d for d, held_out in parts if held_out]


def test_validation_files_are_never_trained_on_and_stay_the_same_when_files_are_added():
    documents = tuple(Document(f"{number}.txt", "x" * 100) for number in range(200))
    train, validation = divided(Corpus("", documents), 0.1)
    assert {d.path for d in train}.isdisjoint(d.path for d in validation)
    assert len(train) + len(validation) == 200
    assert 10 <= len(validation) <= 40
    more = documents + tuple(Document(f"new-{number}.txt", "x" * 100) for number in range(50))
    assert set(validation) <= set(divided(Corpus("", more), 0.1)[1])


def test_the_end_of_a_single_file_is_held_out():
    text = "".join(f"line {number}\n" for number in range(100))
    train, validation = divided(Corpus("", (Document("book.txt", text),)), 0.1)
    assert train[0].text + validation[0].text == text
    assert train[0].text.endswith("\n")
    assert 0.05 < len(validation[0].text) / len(text) < 0.15


def test_the_default_corpus_is_the_standard_library_without_its_tests():
    corpus = DataConfig().corpus()
    assert corpus.survey.totals.num_bytes > 6_000_000
    paths = [document.path for document in corpus.documents]
    assert "json/decoder.py" in paths
    assert paths == [document.path for document in DataConfig().corpus().documents]
    for path in paths:
        assert not {"test", "tests", "idle_test", "site-packages"} & set(path.split("/"))
    _, validation = divided(corpus, 0.05)
    share = sum(len(d.text) for d in validation) / sum(len(d.text) for d in corpus.documents)
    assert 0.025 < share < 0.1


def test_a_stripped_standard_library_is_one_clear_line(tmp_path):
    (tmp_path / "os.py").write_text("import sys\n")
    with pytest.raises(DataError, match=r"holds 0\.0 MB of Python source.*set data\.files"):
        standard_library(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"files": "nowhere/*.txt"}, r"data\.files='nowhere/\*\.txt': no file matches"),
        ({"files": "note*"}, r"only directories match 'note\*' .*; all files below: note\*/\*\*"),
        ({"files": " , "}, "expected at least one glob"),
        ({"files": "empty.txt"}, "all files that match are empty .1."),
        ({"files": "latin.txt"}, r"latin\.txt is not UTF-8 text \(byte 3\)"),
        ({"sequence_length": 100_000}, r"data\.sequence_length=100000 is longer than the train text"),
        ({"sequence_length": 2_000}, r"data\.sequence_length=2000 is longer than the validation text"),
        ({"cache_dir": "empty.txt/cache"}, r"data\.cache_dir=empty\.txt/cache: cannot write there"),
    ],
)
def test_what_cannot_be_trained_on_is_one_clear_line(changes, message, tmp_path):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "latin.txt").write_bytes("caf\xe9".encode("latin-1"))
    with pytest.raises(DataError, match=message) as caught:
        build(**changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sequence_length": 1}, "data.sequence_length=1: expected at least 2"),
        ({"vocab_size": 100}, "data.vocab_size=100: expected at least 257"),
        ({"validation_fraction": 1.0}, "data.validation_fraction=1.0: expected a share"),
    ],
)
def test_impossible_configurations_are_refused_before_any_work(changes, message):
    with pytest.raises(DataError, match=message):
        config(**changes)


@pytest.mark.parametrize(
    "text", ["def f(x):\n\treturn x\n", "naïve 🙂 ﷽\r\n\0", "  lead and trail  ", "", "<|endoftext|>"]
)
def test_the_tokenizer_round_trips_every_text(text):
    tokenizer = build().tokenizer
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_text_that_spells_the_end_of_text_token_does_not_end_the_document():
    tokenizer = build().tokenizer
    (ids,) = tokenizer.encode_documents(["a<|endoftext|>b"])
    assert ids.count(tokenizer.end_of_text_id) == 2


def test_token_bytes_add_up_to_the_bytes_of_the_text():
    tokenizer = build().tokenizer
    text = "naïve 🙂 def return\n"
    (ids,) = tokenizer.encode_documents([text])
    assert tokenizer.token_bytes()[ids].sum() == len(text.encode())


def test_a_second_build_comes_from_the_cache_and_is_equal(monkeypatch):
    first = build()
    monkeypatch.setattr(Tokenizer, "train", None)
    second = build(sequence_length=16)
    assert second.fingerprint == first.fingerprint
    for name in first.train.batch_at(0, 0, 4):
        assert first.train.batch_at(3, 0, 4)[name].equal(second.train.batch_at(3, 0, 4)[name])


def test_changed_text_or_vocabulary_is_tokenised_anew(notes):
    fingerprints = {build().fingerprint, build(vocab_size=310).fingerprint}
    (notes / "00.txt").write_text("something else\n" * 50)
    fingerprints.add(build().fingerprint)
    assert len(fingerprints) == 3


@pytest.mark.parametrize("name", ["entry.json", "tokenizer.json", "train.npy", "validation_offsets.npy"])
@pytest.mark.parametrize("damage", ["truncated", "missing"])
def test_a_damaged_cache_entry_is_announced_and_made_again(name, damage, tmp_path):
    first = build()
    (entry,) = (tmp_path / "cache").iterdir()
    path = entry / name
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-50])
    lines = []
    again = config().build(0, announce=lines.append)
    assert "damaged" in lines[0]
    assert again.train.batch_at(0, 0, 4)["input_ids"].equal(first.train.batch_at(0, 0, 4)["input_ids"])


def test_concurrent_builds_end_in_one_entry_and_leave_nothing_behind(tmp_path):
    with ThreadPoolExecutor(4) as pool:
        built = list(pool.map(lambda _: build(), range(4)))
    assert len({data.fingerprint for data in built}) == 1
    (entry,) = (tmp_path / "cache").iterdir()
    assert built[0].fingerprint.startswith(f"{entry.name}-")


def test_tokenizer_training_gives_the_same_result_in_another_process(tmp_path):
    texts = [prose(seed, 300) for seed in range(5)]
    Tokenizer.train(texts, 320).save(tmp_path)
    (tmp_path / "texts.json").write_text(json.dumps(texts))
    script = (
        "import json, pathlib; from tputrain.data import Tokenizer; out = pathlib.Path('other'); out.mkdir();"
        " Tokenizer.train(json.load(open('texts.json')), 320).save(out)"
    )
    path = ":".join(sys.path)
    subprocess.run(
        [sys.executable, "-c", script], check=True, env={"PYTHONPATH": path, "RAYON_NUM_THREADS": "3"}
    )
    assert (tmp_path / "tokenizer.json").read_text() == (tmp_path / "other" / "tokenizer.json").read_text()


def test_a_given_tokenizer_is_used_and_its_tokens_are_cached_apart(tmp_path):
    trained = build()
    given = Tokenizer.train([prose(99, 300).upper()], 280)
    for _ in range(2):
        data = config().build(0, announce=lambda line: None, tokenizer=given)
        assert data.tokenizer.digest() == given.digest() != trained.tokenizer.digest()
        assert data.fingerprint != trained.fingerprint
        assert len(list((tmp_path / "cache").iterdir())) == 2
    assert build().fingerprint == trained.fingerprint
    same = config().build(0, announce=lambda line: None, tokenizer=trained.tokenizer)
    assert same.fingerprint == trained.fingerprint
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_text_that_is_not_the_expected_is_refused_before_a_tokenizer_is_trained(notes, monkeypatch):
    fingerprint = build().fingerprint
    (notes / "00.txt").write_text("edited")
    monkeypatch.setattr(Tokenizer, "train", None)
    with pytest.raises(
        DataError, match=r"data.files='notes/\*.txt': the text there is not what this run was"
    ):
        config().build(0, announce=lambda line: None, expected=fingerprint)
