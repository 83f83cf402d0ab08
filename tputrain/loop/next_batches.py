"""The batches of the step that comes next: drawn, and on their way to the device, before they are needed."""

import copy
import json
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from tputrain import batches as batch_of
from tputrain import rng
from tputrain.batches import Batch
from tputrain.errors import UserError
from tputrain.feed import Feed
from tputrain.parallel.same_batches import drawn_alike
from tputrain.parallel.world import ALONE, World


class StepBatches(NamedTuple):
    """The micro-batches of one step."""

    host: list[Batch]
    """As the feed gave them: these are counted, remembered and saved."""
    device: list[Batch]
    """Copies of this rank's slices of them, perhaps still under way."""
    slices: list[list[Batch]]
    """Of each, on the host, the one slice a rank that it is divided into."""
    weights: list[list[int]]
    """What each slice counts in the loss: its labels, unless `tputrain.loop.label_weights` knows better."""
    rank: int
    """Whose slices are on the device."""
    context: int = 1
    """Slices that make up whole sequences."""
    epoch: int | None = None
    """That of the last micro-batch, from 0; None: the loader does not know."""
    epochs: float | None = None
    """How many epochs the run has come to with these; None: the loader does not know."""

    @property
    def counted(self) -> tuple[list[Batch], list[float]]:
        """This rank's batches that count in the step's loss, and their factors (`batches.counted`)."""
        parts = [list(each) for each in self.slices]
        for each, own in zip(parts, self.device, strict=True):
            each[self.rank] = own
        return batch_of.counted(parts, self.weights, self.rank, self.context)

    @property
    def form(self) -> Hashable:
        """What the step's program depends on: shapes, dtypes, and which micro-batches weigh nothing."""
        return tuple(
            (batch_of.form(batch), sum(weights) == 0)
            for batch, weights in zip(self.host, self.weights, strict=True)
        )


class _Before(NamedTuple):
    position: dict[str, Any]
    generators: tuple[Any, ...] | None  # None: drawing the batches draws from none of the host's


class NextBatches:
    """Takes each step's batches from a feed, one step ahead where that changes nothing but the time.

    Until they are taken they count as not given out: `state` is the position before them.
    """

    def __init__(self, feed: Feed, device: torch.device, count: int, world: World = ALONE):
        """`count`: micro-batches of a step. Each rank draws them whole, and takes its slice."""
        self._feed, self._device, self._count, self._world = feed, device, count, world
        self._before: _Before | None = None  # while any are drawn, or were begun to be
        self._drawn: StepBatches | None = None
        self._failure: Exception | None = None

    def draw_ahead(self, step: int) -> None:
        """While the device is at the step before: draw the batches of `step` (from 0), if the feed may."""
        if self._feed.can_draw_ahead(self._count):
            try:
                self._draw(step, None)
            except Exception as error:
                self._failure = error  # told when their step has come: those before it are good

    def draw(self, step: int) -> StepBatches:
        """The batches of `step` (from 0), not taken yet. A signal may break this off at any line.

        Raises UserError on all ranks where one of them is given other batches than the others, or none.
        """
        return drawn_alike(
            self._world, "train_loader", lambda: self._draw_once(step), lambda drawn: drawn.host
        )

    def _draw_once(self, step: int) -> StepBatches:
        if self._failure is not None:
            error, self._failure = self._failure, None
            raise error
        if self._drawn is None:
            self._draw(step, rng.snapshot())
        assert self._drawn is not None
        return self._drawn

    def take(self) -> None:
        """The batches that were drawn are given out."""
        self._before = self._drawn = None

    def _draw(self, step: int, generators: tuple[Any, ...] | None) -> None:
        if self._before is not None:  # this was begun and broken off
            self._feed.restore(self._before.position)
            if self._before.generators is not None:
                rng.put_back(self._before.generators)
                generators = self._before.generators
        self._before = _Before(self._feed.state(), generators)
        host = self._feed.batches(step, self._count)
        slices = [self._world.slices(batch) for batch in host]
        rank = self._world.data_rank
        weights = [[batch_of.weight(part) for part in parts] for parts in slices]
        context = self._world.context_size
        own = [
            batch_of.labelled(parts[rank]) if context > 1 and not weight[rank] else parts[rank]
            for parts, weight in zip(slices, weights, strict=True)
        ]
        copies = [batch_of.to_device(part, self._device) for part in own]
        epoch, epochs = self._feed.epoch_of(step), self._feed.epochs_after(step)
        self._drawn = StepBatches(host, copies, slices, weights, rank, context, epoch, epochs)

    @contextmanager
    def as_not_drawn(self) -> Iterator[None]:
        """In here the host's generators are as before the batches were drawn, as the position is."""
        if self._before is None or self._before.generators is None:
            yield
            return
        now = rng.snapshot()
        rng.put_back(self._before.generators)
        try:
            yield
        finally:
            rng.put_back(now)

    @property
    def can_go_back(self) -> bool:
        """Whether the feed can be brought to an earlier position, in this process."""
        return self._feed.can_go_back

    def state(self) -> dict[str, Any]:
        """The position after the last batches taken, as JSON."""
        position = self._feed.state() if self._before is None else self._before.position
        try:
            json.dumps(position)
        except TypeError as error:
            raise UserError(
                f"the position of train_loader (its state_dict, its fingerprint): {error}: "
                "a checkpoint holds numbers, text, lists and dicts"
            ) from None
        return position

    def restore(self, state: dict[str, Any]) -> None:
        """Go to a position that `state` gave."""
        self._before = self._drawn = self._failure = None
        self._feed.restore(copy.deepcopy(state))
