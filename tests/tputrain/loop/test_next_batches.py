"""Batches drawn a step ahead, and what a checkpoint says of them."""

import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, TensorDataset

from tputrain import CheckpointConfig, LogConfig, RunConfig, ScheduleConfig, Trainer, TrainerConfig
from tputrain.callbacks.callback import Callback
from tputrain.errors import UserError
from tputrain.feed import feed_of
from tputrain.loggers.jsonl import read_jsonl
from tputrain.loop.next_batches import NextBatches
from tputrain.signals import Interrupted

CPU = torch.device("cpu")


class ByStep:
    """Batches that are a function of the step; `asked` says for which, and what had ended by then."""

    def __init__(self, fails_at: int | None = None):
        self.asked: list[int] = []
        self.fails_at = fails_at

    def batch_at(self, step: int, micro: int) -> list[torch.Tensor]:
        self.asked.append(step)
        if step == self.fails_at:
            raise UserError(f"no batch {step}")
        return [torch.full((2, 4), float(step)), torch.tensor([0, 1])]


class Hooked(Callback):
    """Notes for which steps batches were asked when values are read."""

    def __init__(self, loader: ByStep):
        self.loader, self.asked_at_log = loader, []

    def on_log(self, trainer, records):
        self.asked_at_log.append((trainer.step, max(self.loader.asked)))


def config(run_dir: Path, steps: int = 6) -> RunConfig:
    return RunConfig(
        device="tpu",
        run_dir=str(run_dir),
        trainer=TrainerConfig(steps=steps),
        schedule=ScheduleConfig(name="constant"),
        checkpoint=CheckpointConfig(every=3),
        log=LogConfig(every=2, progress="none"),
    )


def test_the_next_batch_is_drawn_before_values_are_read_but_not_before_a_checkpoint(tmp_path):
    loader = ByStep()
    hooked = Hooked(loader)
    Trainer(nn.Linear(4, 2), config(tmp_path), train_loader=loader, callbacks=[hooked]).fit()
    # Steps count from 1, batches from 0.
    assert hooked.asked_at_log == [(1, 1), (2, 2), (3, 2), (4, 4), (6, 5)]
    assert loader.asked == list(range(6))


def test_what_fails_ahead_is_told_when_its_step_has_come(tmp_path):
    loader = ByStep(fails_at=4)
    with pytest.raises(UserError, match="no batch 4"):
        Trainer(nn.Linear(4, 2), config(tmp_path), train_loader=loader).fit()
    assert [record["step"] for record in read_jsonl(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]


def test_the_copies_are_on_the_device_and_what_is_counted_stays_on_the_host():
    data = NextBatches(feed_of(ByStep(), CPU), torch.device("tpu"), 2)
    data.draw_ahead(0)
    drawn = data.draw(0)
    assert {tensor.device.type for batch in drawn.device for tensor in batch} == {"tpu"}
    assert {tensor.device.type for batch in drawn.host for tensor in batch} == {"cpu"}
    assert drawn.weights == [[2], [2]]
    assert data.draw(0) is drawn  # until it is taken
    data.take()
    assert data.draw(1) is not drawn


class Counting:
    """A loader with a position of its own."""

    can_read_ahead = True

    def __init__(self):
        self.place = 0

    def __iter__(self):
        while True:
            self.place += 1
            yield [torch.full((1,), float(self.place))]

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


@pytest.mark.parametrize("is_given_early", [True, False])
def test_the_position_is_that_after_the_batches_taken(is_given_early):
    loader = Counting()
    loader.can_read_ahead = is_given_early
    data = NextBatches(feed_of(loader, CPU), CPU, 1)
    places = [data.state()["loader"]["place"]]
    for step in range(3):
        data.draw(step)
        data.take()
        places.append(data.state()["loader"]["place"])
        data.draw_ahead(step + 1)
        assert loader.place == step + 1 + is_given_early
        places.append(data.state()["loader"]["place"])
    assert places == [0, 1, 1, 2, 2, 3, 3]
    state = data.state()
    other = NextBatches(feed_of(Counting(), CPU), CPU, 1)
    other.restore(state)
    assert other.draw(3).host[0][0].item() == data.draw(3).host[0][0].item() == 4.0


def numbered(**options) -> DataLoader:
    numbers = torch.arange(7.0).reshape(7, 1)
    return DataLoader(TensorDataset(numbers), batch_size=2, shuffle=True, **options)


@pytest.mark.parametrize(
    ("loader", "found"),
    [
        (numbered(num_workers=1), [False, True, False, True]),  # four batches an epoch, two a step
        (numbered(), [False] * 4),
        ([[torch.ones(1)]] * 4, [False] * 4),
    ],
)
def test_a_loader_is_asked_ahead_within_an_epoch_if_workers_do_its_work(loader, found):
    torch.manual_seed(3)
    data = NextBatches(feed_of(loader, CPU), CPU, 2)
    asked = []
    for step in range(4):
        asked.append(data._feed.can_draw_ahead(2))
        data.draw_ahead(step)
        data.draw(step)
        data.take()
    assert asked == found


class SavesAtTwoAndStops(Callback):
    """Asks when the next batches were drawn already, which no configuration does."""

    def on_step_end(self, trainer):
        if trainer.step == 2:
            trainer.control.save = trainer.control.stop = True


def test_a_checkpoint_goes_on_with_the_batch_that_was_drawn_ahead(tmp_path):
    def losses(name: str, steps: int, *callbacks: Callback) -> list[str]:
        torch.manual_seed(1)
        samples = TensorDataset(torch.randn(9, 4), torch.randint(2, (9,)))
        loader = DataLoader(samples, batch_size=2, shuffle=True, num_workers=1)
        trainer = Trainer(
            nn.Linear(4, 2), config(tmp_path / name, steps), train_loader=loader, callbacks=callbacks
        )
        trainer.fit()
        return [record["loss_hex"] for record in read_jsonl(tmp_path / name / "metrics.jsonl")]

    whole = losses("whole", 8)
    assert len(losses("parts", 8, SavesAtTwoAndStops())) == 2
    assert losses("parts", 8) == whole


def test_a_loader_s_own_generator_is_part_of_the_position(tmp_path):
    def losses(name: str, steps: int) -> list[str]:
        torch.manual_seed(1)
        samples = TensorDataset(torch.randn(9, 4), torch.randint(2, (9,)))
        own = torch.Generator().manual_seed(5)
        loader = DataLoader(samples, batch_size=2, shuffle=True, generator=own)
        Trainer(nn.Linear(4, 2), config(tmp_path / name, steps), train_loader=loader).fit()
        return [record["loss_hex"] for record in read_jsonl(tmp_path / name / "metrics.jsonl")]

    whole = losses("whole", 13)
    for steps in (7, 13):  # in the second epoch, and to the third
        parts = losses("parts", steps)
    assert parts == whole


def test_at_the_beginning_a_loader_s_own_generator_is_put_back_too():
    feed = feed_of(numbered(generator=torch.Generator().manual_seed(5)), CPU)
    beginning = feed.state()
    first = [batch[0] for batch in feed.batches(0, 3)]
    feed.restore(beginning)
    for again, before in zip(feed.batches(0, 3), first, strict=True):
        assert torch.equal(again[0], before)


class Augmented(TensorDataset):
    """Draws from torch's generator with every sample."""

    def __getitem__(self, index):
        inputs, label = super().__getitem__(index)
        return inputs + torch.rand(4), label


def test_a_signal_between_drawing_and_training_leaves_the_generators_as_the_checkpoint_needs_them(tmp_path):
    """As one does that comes while the state is copied before the first batch of another size."""

    def losses(name: str, is_stopped: bool = False) -> list[str]:
        torch.manual_seed(1)
        samples = Augmented(torch.randn(9, 4), torch.randint(2, (9,)))
        loader = DataLoader(samples, batch_size=2, shuffle=True)
        trainer = Trainer(nn.Linear(4, 2), config(tmp_path / name, 8), train_loader=loader)
        rescue = trainer._first_runs._rescue

        def rescue_and_stop() -> object:
            rescued = rescue()
            if is_stopped and trainer.step == 4:
                os.kill(os.getpid(), signal.SIGTERM)
            return rescued

        trainer._first_runs._rescue = rescue_and_stop
        with suppress(Interrupted):
            trainer.fit()
        return [record["loss_hex"] for record in read_jsonl(tmp_path / name / "metrics.jsonl")]

    whole = losses("whole")
    assert len(losses("parts", is_stopped=True)) == 4
    assert losses("parts") == whole


@pytest.mark.parametrize(
    ("before", "taken", "now", "first", "told"),
    [
        (8, 4, 4, 32, "goes on after 8 batches in place of 4\n"),
        (4, 6, 8, 24, "goes on after 3 batches in place of 6\n"),
        (4, 5, 8, 16, "goes on after 2 batches in place of 5; samples that come again: 4\n"),
        (8, 5, 4, 0, "goes on after 9 batches in place of 5\n"),  # the epoch has ended
        (4, 9, 8, 0, "goes on after 5 batches in place of 9\n"),
        (4, 3, 4, 12, ""),
    ],
)
def test_an_epoch_goes_on_where_it_was_with_batches_of_another_size(before, taken, now, first, told, capsys):
    def feed(size: int):
        return feed_of(DataLoader(list(range(36)), batch_size=size), CPU)

    earlier, later = feed(before), feed(now)
    earlier.batches(0, taken)
    later.restore(earlier.state())
    said = capsys.readouterr().out
    assert said.endswith(told) if told else not said
    (batch,) = later.batches(taken, 1)
    assert batch[0] == first


def test_an_epoch_without_a_length_ends_where_its_samples_do():
    class Numbers(IterableDataset):
        def __iter__(self):
            return iter(range(36))

    earlier, later = (feed_of(DataLoader(Numbers(), batch_size=size), CPU) for size in (8, 4))
    earlier.batches(0, 5)
    later.restore(earlier.state())
    (batch,) = later.batches(5, 1)
    assert batch[0] == 0


class ByEpoch:
    """Orders eight samples by the epoch; as a sampler, in batches of `size` as a batch sampler."""

    def __init__(self, size: int | None = None):
        self.size, self.epochs = size, []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __len__(self) -> int:
        return 8 if self.size is None else 8 // self.size

    def __iter__(self):
        order = torch.randperm(8, generator=torch.Generator().manual_seed(self.epochs[-1]))
        yield from (order if self.size is None else order.reshape(-1, self.size)).tolist()


class StreamByEpoch(IterableDataset, ByEpoch):
    def __init__(self):
        ByEpoch.__init__(self)

    def __iter__(self):
        return ByEpoch.__iter__(self)


@pytest.mark.parametrize("place", ["sampler", "batch_sampler", "sampler of a batch_sampler", "dataset"])
def test_whatever_orders_the_samples_is_told_each_epoch_once(place):
    def loader() -> tuple[DataLoader, ByEpoch]:
        if place == "dataset":
            return DataLoader(told := StreamByEpoch(), batch_size=2), told
        told = ByEpoch(2 if place == "batch_sampler" else None)
        if place == "sampler":
            return DataLoader(range(8), batch_size=2, sampler=told), told
        batch_sampler = told if place == "batch_sampler" else BatchSampler(told, 2, False)
        return DataLoader(range(8), batch_sampler=batch_sampler), told

    first, told = loader()
    feed = feed_of(first, CPU)
    epochs = [torch.cat(feed.batches(step, 4)) for step in range(3)]
    assert told.epochs == [0, 1, 2]
    for epoch, samples in enumerate(epochs):
        assert torch.equal(samples, torch.randperm(8, generator=torch.Generator().manual_seed(epoch)))
    state = feed.state()
    second, told = loader()
    resumed = feed_of(second, CPU)
    resumed.restore(state)
    assert torch.equal(torch.cat(resumed.batches(3, 4)), torch.cat(feed.batches(3, 4)))
    assert told.epochs == [2, 3]


def test_a_batch_sampler_tells_its_batch_size():
    def feed(size: int):
        return feed_of(DataLoader(range(36), batch_sampler=BatchSampler(range(36), size, False)), CPU)

    earlier, later = feed(8), feed(4)
    earlier.batches(0, 2)
    later.restore(earlier.state())
    (batch,) = later.batches(2, 1)
    assert batch[0] == 16
