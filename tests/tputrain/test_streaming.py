"""Streams: what they hold, and that they go on where they were, to the bit."""

import json
import re
import threading
from pathlib import Path

import datasets
import pytest
import torch

from tputrain import CheckpointConfig, LogConfig, RunConfig, ScheduleConfig, Trainer, TrainerConfig, UserError
from tputrain.data import DataConfig, DataError
from tputrain.data.corpus import is_held_out, row_document
from tputrain.feed import StatefulFeed, feed_of
from tputrain.loggers.jsonl import read_jsonl
from tputrain.loop.next_batches import NextBatches
from tputrain.prefetch import Prefetched

ROWS = [{"text": f"<{number}> " + "some words " * (number % 7)} for number in range(120)]


@pytest.fixture(autouse=True)
def directory(tmp_path, monkeypatch):
    """A directory to be in, with the same rows in several forms."""
    monkeypatch.chdir(tmp_path)
    for name, part in (("a", ROWS[:50]), ("b", ROWS[50:])):
        (tmp_path / f"rows-{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
        datasets.Dataset.from_list(part).to_parquet(f"rows-{name}.parquet")
    datasets.Dataset.from_list(ROWS).save_to_disk("saved")
    return tmp_path


def stream(**changes):
    settings = {"source": "jsonl", "files": "rows-*.jsonl", "sequence_length": 16, "shuffle_block": 10}
    settings |= {"streaming": True, "vocab_size": 300, "validation_fraction": 0.1, **changes}
    if settings["source"] == "saved":
        del settings["files"]
    cfg = DataConfig(**settings)
    return cfg.build(7, announce=lambda line: None)


def take(loader, count: int) -> list[dict]:
    batches = iter(loader)
    taken = [next(batches) for _ in range(count)]
    batches.close()
    return taken


def equal(first: list[dict], second: list[dict]) -> bool:
    return all(
        a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)
        for a, b in zip(first, second, strict=True)
    )


SOURCES = [
    {},
    {"source": "parquet", "files": "rows-*.parquet"},
    {"source": "saved", "name": "saved"},
]


def walked(loader, count: int):
    """So many batches, and the states before the first one and after each, as a checkpoint keeps them."""
    batches, states, walk = [], [loader.state_dict()], iter(loader)
    for _ in range(count):
        batches.append(next(walk))
        states.append(json.loads(json.dumps(loader.state_dict())))
    return batches, states


@pytest.mark.parametrize("source", SOURCES, ids=["jsonl", "parquet", "saved"])
def test_after_any_batch_a_stream_goes_on_to_the_bit(source):
    text = stream(**source)
    whole = text.training_batches(4, 1)
    batches, states = walked(whole, 80)  # of more than two epochs and many blocks
    assert states[-1]["epoch"] >= 2
    for place in range(0, 76, 7):
        again = text.training_batches(4, 1)
        again.load_state_dict(states[place])
        assert equal(take(again, 4), batches[place : place + 4]), place


@pytest.mark.parametrize("source", SOURCES, ids=["jsonl", "parquet", "saved"])
def test_a_loader_that_went_on_from_a_late_position_goes_back_to_one_in_the_first_block(source):
    text = stream(**source)
    loader = text.training_batches(4, 1)
    batches, states = walked(loader, 12)
    assert [(states[n]["epoch"], states[n]["dataset"] is None) for n in (0, 1, 8)] == [
        (0, True),
        (0, True),
        (0, False),
    ]
    again = text.training_batches(4, 1)
    for place in (8, 1, 8, 0):
        again.load_state_dict(states[place])
        assert equal(take(again, 4), batches[place : place + 4]), place


def test_a_stream_is_the_documents_to_train_on_end_to_end_epoch_after_epoch_shuffled_in_blocks():
    text = stream()
    documents = [
        row["text"]
        for row in ROWS
        if not is_held_out(row_document(row["text"]), text.cfg.validation_fraction)
    ]
    assert text.validation.num_documents == len(ROWS) - len(documents) > 0
    epoch = [index for ids in text.tokenizer.encode_documents(documents) for index in ids]
    batches = take(text.training_batches(3, 1), 60)
    for batch in batches:
        assert set(batch) == {"input_ids", "labels", "position_ids", "document_ids"}
        assert batch["input_ids"].shape == (3, 16)
    sequences = torch.cat([batch["input_ids"] for batch in batches]).tolist()
    num_tokens = 10 * 16  # of a block, whatever the size of a batch
    assert 18 * num_tokens > len(epoch) + num_tokens
    for block in range(18):
        rows = sequences[10 * block : 10 * block + 10]
        tokens = (epoch * 3)[block * num_tokens : (block + 1) * num_tokens]
        expected = [tokens[first : first + 16] for first in range(0, num_tokens, 16)]
        assert rows != expected
        assert sorted(rows) == sorted(expected)


def test_every_label_of_a_stream_is_the_next_token_also_across_blocks():
    text = stream(shuffle_block=2)
    loader = text.training_batches(2, 1)
    sequences = [row for batch in take(loader, 30) for row in zip(*(batch[key] for key in batch))]
    ends = text.tokenizer.end_of_text_id
    for ids, labels, positions, _ in sequences:
        for place in range(15):
            starts_document = positions[place + 1] == 0
            assert labels[place] == (-100 if starts_document else ids[place + 1])
    # The last label of a sequence is the first token of another one: of the same stream, in another order.
    firsts = {int(ids[0]) for ids, *_ in sequences}
    lasts = [int(labels[-1]) for _, labels, *_ in sequences if labels[-1] != -100]
    assert sum(last in firsts for last in lasts) > 0.8 * len(lasts)
    assert ends in lasts or len(lasts) < len(sequences)


def test_the_seed_decides_the_order_and_nothing_else():
    batches = [take(stream().training_batches(2, 1), 5) for _ in range(2)]
    assert equal(*batches)
    cfg = stream().cfg
    other = cfg.build(8, announce=lambda line: None)
    assert other.fingerprint == stream().fingerprint
    first, second = take(stream().training_batches(10, 1), 1)[0], take(other.training_batches(10, 1), 1)[0]
    assert not torch.equal(first["input_ids"], second["input_ids"])
    assert sorted(first["input_ids"].tolist()) == sorted(second["input_ids"].tolist())


def test_answers_alone_are_learned_from_a_stream(directory):
    rows = [{"prompt": f"what is {number}", "answer": f"It is {number}."} for number in range(80)]
    (directory / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = stream(files="chats.jsonl", format="prompt", sequence_length=48, shuffle_block=4)
    answers = [
        text.tokenizer.decode(batch["labels"][batch["labels"] != -100].tolist())
        for batch in take(text.training_batches(2, 1), 4)
    ]
    assert all("It is" in answer and "what" not in answer for answer in answers)


def test_a_stream_of_other_text_is_not_gone_on_with(directory):
    text = stream()
    path = directory / "rows-a.jsonl"
    path.write_text("".join(json.dumps({"text": row["text"].upper()}) + "\n" for row in ROWS[:50]))
    with pytest.raises(
        DataError, match=r"data.files='rows-\*.jsonl': the text there is not what this run was"
    ):
        text.cfg.build(7, lambda line: None, tokenizer=text.tokenizer, expected=text.fingerprint)


def test_a_position_of_an_earlier_tputrain_is_one_clear_line():
    loader = stream().training_batches(2, 1)
    old = {name: value for name, value in loader.state_dict().items() if name != "sequences"}
    with pytest.raises(DataError, match="counted it in batches: go on with that one, or begin anew"):
        loader.load_state_dict(old | {"batches": 3})


def test_a_stream_without_anything_held_out_is_one_clear_line():
    with pytest.raises(
        DataError, match=r"nothing is held out to be judged by: raise data.validation_fraction"
    ):
        stream(validation_fraction=1e-9)


class Bag(torch.nn.Module):
    """The smallest model of text."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = torch.nn.Embedding(300, 8), torch.nn.Linear(8, 300)

    def forward(self, input_ids, labels, **rest):
        logits = self.head(self.embed(input_ids)).flatten(0, 1)
        return torch.nn.functional.cross_entropy(logits, labels.flatten())


class Numbered:
    """A user's loader with a position of its own, which ends after seven batches."""

    def __init__(self) -> None:
        self.place, self.asked = 0, []

    def __iter__(self):
        while self.place < 7:
            self.place += 1
            self.asked.append(self.place)
            generator = torch.Generator().manual_seed(self.place)
            ids = torch.randint(300, (2, 9), generator=generator)
            yield {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}
        self.place = 0

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


@pytest.mark.parametrize(("kind", "device"), [("stream", "tpu"), ("stateful", "cpu")])
def test_a_stopped_run_resumes_by_the_loaders_state_and_its_losses_are_those_of_one_that_was_not(
    tmp_path, kind, device
):
    made = []

    def run(name: str, steps: int) -> list[str]:
        loader = stream().training_batches(2, 2) if kind == "stream" else Numbered()
        made.append(loader)
        cfg = RunConfig(
            device=device,
            run_dir=str(tmp_path / name),
            trainer=TrainerConfig(steps=steps, accumulate=2),
            schedule=ScheduleConfig(name="constant"),
            log=LogConfig(progress="none"),
        )
        Trainer(Bag(), cfg, train_loader=loader).fit()
        return [record["loss_hex"] for record in read_jsonl(tmp_path / name / "metrics.jsonl")]

    whole = run("whole", 9)
    for steps in (1, 4, 7, 9):
        parts = run("parts", steps)
    assert parts == whole
    if kind == "stateful":  # nothing was skipped: what was asked for is what was trained on
        assert made[-1].asked == [1, 2, 3, 4]


class HeldUp:
    """A dataset that is asked for rows by one thread at a time, or remembers that it was not.

    At row 40 the first thread waits for another one to begin, for half a second.
    """

    def __init__(self, rows) -> None:
        self.rows, self.readers, self.num_readers_at_once = rows, 0, 0
        self.is_held, self.another = threading.Event(), threading.Event()

    def __iter__(self):
        self.readers += 1
        self.num_readers_at_once = max(self.num_readers_at_once, self.readers)
        if self.is_held.is_set():
            self.another.set()
        try:
            for number, row in enumerate(self.rows):
                if number == 40 and not self.is_held.is_set():
                    self.is_held.set()
                    self.another.wait(0.5)
                yield row
        finally:
            self.readers -= 1

    def __getattr__(self, name: str):
        return getattr(self.rows, name)


@pytest.mark.parametrize("source", SOURCES, ids=["jsonl", "parquet", "saved"])
def test_a_position_is_gone_back_to_while_the_thread_of_another_one_reads(source):
    text = stream(**source)
    loader = text.training_batches(2, 1)
    loader._rows = rows = HeldUp(loader._rows)
    feed = feed_of(loader, torch.device("cpu"))
    feed.batches(0, 1)
    position = json.loads(json.dumps(feed.state()))
    loader._ahead = 99
    feed.restore(position)  # with room to read on, up to row 40
    feed.batches(1, 1)
    assert rows.is_held.wait(30)
    feed.restore(position)
    again = feed.batches(1, 60)
    assert rows.num_readers_at_once == 1
    undisturbed = feed_of(text.training_batches(2, 1), torch.device("cpu"))
    assert equal(again, undisturbed.batches(0, 61)[1:])
    assert feed.state() == undisturbed.state() | {"epoch": feed.state()["epoch"]}


class Diverges(Bag):
    """Computes NaN in its seventh step, the first time; remembers all it is given in training."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch.Tensor] = []

    def forward(self, input_ids, labels, **rest):
        self.seen.append(input_ids)
        loss = super().forward(input_ids, labels)
        return loss * float("nan") if len(self.seen) == 7 else loss


def test_after_a_rollback_a_run_sees_every_sample_of_the_stream_that_an_undisturbed_one_sees(tmp_path):
    model = Diverges()
    cfg = RunConfig(
        device="cpu",
        run_dir=str(tmp_path / "run"),
        trainer=TrainerConfig(steps=30, on_nonfinite="rollback"),
        checkpoint=CheckpointConfig(every=5),
        log=LogConfig(every=2, progress="none"),
    )
    Trainer(model, cfg, train_loader=stream(prefetch=20).training_batches(2, 1)).fit()
    expected = [batch["input_ids"] for batch in take(stream().training_batches(2, 1), 30)]
    # Steps 1 to 8, of which 7 is bad; from step 6 again, with a replay of step 7 before it is left out.
    seen = [*expected[:8], expected[5], expected[6], *expected[6:]]
    assert len(model.seen) == len(seen)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(model.seen, seen, strict=True))


def test_the_loader_in_the_documentation_runs(capsys):
    page = Path(__file__).resolve().parents[2] / "docs" / "data.md"
    (block,) = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    names: dict = {}
    exec(block, names)
    assert names["trainer"].step == 3
    assert names["trainer"]._data.state()["loader"] == {"place": 3}


def test_a_state_that_is_no_json_is_one_clear_line():
    loader = Numbered()
    loader.state_dict = lambda: {"generator": torch.zeros(2)}
    cpu = torch.device("cpu")
    feed = feed_of(loader, cpu)
    assert isinstance(feed, StatefulFeed)
    with pytest.raises(UserError, match=r"its state_dict.*: Object of type Tensor is not JSON"):
        NextBatches(feed, cpu, 1).state()


def test_a_stateful_loader_without_a_batch_is_one_clear_line():
    loader = Numbered()
    loader.__class__ = type("Empty", (Numbered,), {"__iter__": lambda self: iter(())})
    with pytest.raises(UserError, match="train_loader gave no batch"):
        feed_of(loader, torch.device("cpu")).batches(0, 1)


def test_prefetching_keeps_the_order_passes_on_errors_and_stops_when_closed():
    assert list(Prefetched(iter(range(50)), 3)) == list(range(50))

    def failing():
        yield 1
        raise DataError("the second is broken")

    prefetched = Prefetched(failing(), 3)
    assert next(prefetched) == 1
    with pytest.raises(DataError, match="the second is broken"):
        next(prefetched)
    made, room = [], threading.Event()

    def endless():
        while True:
            made.append(len(made))
            if len(made) == 4:
                room.set()
            yield len(made)

    prefetched = Prefetched(endless(), 2)
    assert next(prefetched) == 1
    assert room.wait(10)  # one given, two waiting, one in hand: no more are made
    prefetched.close()
    prefetched._thread.join(10)
    assert not prefetched._thread.is_alive()
    assert len(made) <= 6
    assert list(prefetched) == []
