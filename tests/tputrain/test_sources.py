"""Rows of datasets as text to train on, whatever they lie in, and what is said where they cannot be."""

import json

import datasets
import pytest

from tputrain.data import DataConfig, DataError
from tputrain.data.corpus import split
from tputrain.errors import UserError

ROWS = [
    {"id": number, "text": f"row {number} holds the words {number * number} and more"} for number in range(90)
]


@pytest.fixture(autouse=True)
def directory(tmp_path, monkeypatch):
    """A directory to be in, with the same rows in every form."""
    monkeypatch.chdir(tmp_path)
    dataset = datasets.Dataset.from_list(ROWS)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    dataset.to_csv("rows.csv")
    dataset.to_parquet("rows.parquet")
    dataset.save_to_disk("saved")
    datasets.DatasetDict({"train": dataset, "test": dataset.select(range(7))}).save_to_disk("parts")
    (tmp_path / "hub-like").mkdir()
    dataset.to_parquet("hub-like/train.parquet")
    return tmp_path


def config(**changes) -> DataConfig:
    return DataConfig(**{"sequence_length": 16, "vocab_size": 300, "cache_dir": "cache", **changes})


def build(**changes):
    return config(**changes).build(0, announce=lambda line: None)


SOURCES = [
    {"source": "jsonl", "files": "rows.jsonl"},
    {"source": "csv", "files": "rows.csv"},
    {"source": "parquet", "files": "rows.parquet"},
    {"source": "saved", "name": "saved"},
    {"source": "saved", "name": "parts"},
    {"source": "hub", "name": "hub-like"},
]


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.get("name") or source["files"])
@pytest.mark.parametrize("streaming", [False, True], ids=["whole", "streaming"])
def test_every_source_gives_the_same_documents(source, streaming):
    corpus = config(**source, streaming=streaming).corpus()
    assert [document.text for document in corpus.documents] == [row["text"] for row in ROWS]
    assert corpus.unit == "row"


def test_rows_become_sequences_and_are_told_of():
    data = build(source="jsonl", files="rows.jsonl")
    assert data.train.num_documents + data.validation.num_documents == 90
    assert data.describe()[0].startswith("data: rows.jsonl, 90 rows, ")
    same = build(source="parquet", files="rows.parquet")
    assert same.fingerprint == data.fingerprint
    assert same.train.batch_at(3, 0, 4)["input_ids"].equal(data.train.batch_at(3, 0, 4)["input_ids"])


def test_several_files_are_one_dataset_in_the_order_of_their_names(directory):
    for name, rows in (("b", ROWS[:3]), ("a", ROWS[3:5])):
        (directory / f"part-{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    corpus = config(source="jsonl", files="part-*.jsonl").corpus()
    assert [document.text for document in corpus.documents] == [
        ROWS[number]["text"] for number in (3, 4, 0, 1, 2)
    ]


def test_equal_rows_are_all_trained_on_or_all_held_out_and_rows_stay_whole(directory):
    texts = [f"text {number % 10}" for number in range(40)]
    (directory / "twice.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    parts = list(split(config(source="jsonl", files="twice.jsonl").corpus(), 0.05))
    train = [document for document, is_validation in parts if not is_validation]
    validation = [document for document, is_validation in parts if is_validation]
    assert {document.text for document in train}.isdisjoint(document.text for document in validation)
    assert sorted(document.text for document in train + validation) == sorted(texts)
    assert validation


@pytest.mark.parametrize(
    "named",
    [
        {"source": "jsonl", "files": "rows.jsonl", "validation_files": "judge.jsonl"},
        {"source": "saved", "name": "parts", "validation_split": "test"},
    ],
    ids=["files", "split"],
)
def test_what_to_be_judged_by_can_be_named(directory, named):
    (directory / "judge.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS[:7]))
    data = build(**named)
    assert (data.train.num_documents, data.validation.num_documents) == (90, 7)
    alone = build(**{key: value for key, value in named.items() if not key.startswith("validation")})
    assert alone.fingerprint != data.fingerprint


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"source": "jsonl", "files": "row.jsonl"},
            r"no file matches 'row\.jsonl'.*; did you mean rows\.jsonl\?",
        ),
        ({"source": "saved", "name": "save"}, r"data\.name='save': no such directory; did you mean saved\?"),
        ({"source": "saved", "name": "hub-like"}, "data.name='hub-like': cannot be read: .*save_to_disk"),
        ({"source": "saved", "name": "parts", "split": "tst"}, "data.split=tst: .* did you mean test"),
        ({"source": "saved", "name": "saved", "validation_split": "x"}, "saved is one dataset, unsplit"),
        (
            {"source": "hub", "name": "hub-like", "split": "x"},
            "data.name=.hub-like.: cannot be read: .*[Ss]plit.*x",
        ),
        (
            {"source": "csv", "files": "rows.csv", "text_column": "txt"},
            "data.text_column=txt: no such column in ",
        ),
        (
            {"source": "csv", "files": "rows.csv", "text_column": "txt"},
            "which has id, text; did you mean text",
        ),
        (
            {"source": "csv", "files": "rows.csv", "text_column": "id"},
            r"data.files='rows.csv': /.*/rows.csv, row 1, column id: 0: expected text",
        ),
        (
            {"source": "jsonl", "files": "*o*en*.jsonl"},
            r"data.files='\*o\*en\*.jsonl': cannot be read: /.*/broken.jsonl, line 3: no JSON \(Expecting",
        ),
        (
            {"source": "jsonl", "files": "[mr]*.jsonl"},
            r"/mixed.jsonl, line 2(: column text is a number, in earlier lines it is a s|, .*: 2: expect)",
        ),
        (
            {"source": "jsonl", "files": "rows.jsonl", "validation_files": "numbers.jsonl"},
            r"data.validation_files='numbers.jsonl': /.*/numbers.jsonl, line 1, column text: 5: expected",
        ),
        ({"source": "jsonl", "files": "empty.jsonl"}, "data.files='empty.jsonl': there is no row with text"),
        ({"source": "jsonl", "files": "blank.jsonl"}, "data.files='blank.jsonl': there is no row with text"),
        ({"source": "jsonl", "files": "one.jsonl"}, "one.jsonl: there is 1 row .* data.validation_files"),
        (
            {"source": "parquet", "files": "rows.csv"},
            "data.files='rows.csv': cannot be read: .* parquet files",
        ),
    ],
)
@pytest.mark.parametrize("streaming", [False, True], ids=["whole", "streaming"])
def test_what_cannot_be_read_is_one_clear_line(directory, changes, message, streaming, capfd):
    (directory / "broken.jsonl").write_text('{"text": "one"}\n\n{"text": \n')
    (directory / "mixed.jsonl").write_text('{"text": "one"}\n{"text": 2}\n')
    (directory / "numbers.jsonl").write_text('{"text": 5}\n')
    (directory / "empty.jsonl").write_text("")
    (directory / "blank.jsonl").write_text('{"text": ""}\n{"text": null}\n')
    (directory / "one.jsonl").write_text('{"text": "alone"}\n' * 2)
    cfg = config(**changes, streaming=streaming)
    with pytest.raises(DataError, match=message) as caught:
        list(split(cfg.corpus(), cfg.validation_fraction))
    assert "\n" not in str(caught.value)
    assert "Failed to" not in capfd.readouterr().err  # what `datasets` logs beside what it raises


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ({"source": "jsonl", "files": "array.jsonl"}, "cannot be read: a fault; expected"),
        ({"source": "csv", "files": "rows.csv"}, "cannot be read: a fault in row 7; expected"),
        ({"source": "hub", "name": "hub-like"}, "cannot be read: a fault in row 7; expected"),
    ],
)
def test_only_of_json_is_the_library_s_row_left_out(directory, monkeypatch, source, said):
    def fail(*arguments, **named):
        raise ValueError("a fault in row 7")

    (directory / "array.jsonl").write_text(json.dumps(ROWS))  # no lines, whose number could be given instead
    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(DataError, match=said):
        list(config(**source).corpus().documents)


def test_a_name_that_is_not_on_the_hub_is_one_clear_line(monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match=r"data\.name='nobody/nothing': cannot be read: .*hub") as caught:
        config(source="hub", name="nobody/nothing").corpus()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"source": "json"}, "data.source=json: expected one of .*did you mean jsonl"),
        ({"source": "csv"}, "data.files=null: expected files to read, such as data.files='train/.*csv'"),
        (
            {"source": "hub"},
            "data.name=null: expected the name of a dataset, or a directory, with data.source=hub",
        ),
        ({"source": "csv", "files": "a.csv", "name": "x"}, "data.name=x: expected nothing"),
        (
            {"source": "hub", "name": "x", "files": "a"},
            "data.files=a: expected nothing with data.source=hub; it is a setting of jsonl",
        ),
        (
            {"validation_files": "a"},
            "data.validation_files=a: expected nothing with data.source=text; it is a setting of jsonl, csv",
        ),
        ({"source": "saved", "name": "x", "subset": "y"}, "data.subset=y: expected nothing"),
        (
            {"format": "messages"},
            "data.format=messages: expected nothing with data.source=text; it is a setting of jsonl",
        ),
        (
            {"streaming": True},
            "data.streaming=true: expected nothing with data.source=text; it is a setting of jsonl",
        ),
        ({"buckets": 0}, "data.buckets=0: expected 1 to data.sequence_length=16"),
    ],
)
def test_settings_that_do_not_go_together_are_refused_before_any_work(changes, message):
    with pytest.raises(UserError, match=message):
        config(**changes)
