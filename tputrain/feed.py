"""Training batches by step, and the position in them that a checkpoint remembers."""

import json
import time
from collections.abc import Iterable, Iterator
from typing import Any, Protocol, runtime_checkable

import torch

from tputrain import rng
from tputrain.announce import say
from tputrain.batches import Batch
from tputrain.errors import UserError
from tputrain.signals import WaitBrokenError


@runtime_checkable
class IndexedLoader(Protocol):
    """A loader whose batches are a pure function of the step: resuming needs no skipping.

    One that has a `fingerprint` (text that names its data) is asked for the same at a resume.
    """

    def batch_at(self, step: int, micro: int) -> Batch:
        """Micro-batch `micro` of step `step`, both from 0."""


@runtime_checkable
class StatefulLoader(Protocol):
    """An iterable of batches that knows its own position: a stream, torchdata's StatefulDataLoader.

    One that has `set_epoch(epoch)` is told each epoch, from 0; one that has a `fingerprint` is asked for the
    same at a resume.
    """

    def __iter__(self) -> Iterator[Batch]:
        """Batches from the position on."""

    def state_dict(self) -> dict[str, Any]:
        """The position after the last batch given, as JSON."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a position that `state_dict` gave, with the next `iter`."""


class Feed(Protocol):
    """What the training loop asks for data."""

    def batches(self, step: int, count: int) -> list[Batch]:
        """The `count` micro-batches of step `step` (from 0), on the host.

        A signal breaks the wait for them by a WaitBrokenError: then the position must be what it was before.
        """

    def state(self) -> dict[str, Any]:
        """The position after the last batches given, as JSON."""

    def restore(self, state: dict[str, Any]) -> None:
        """Go to a position that `state` gave."""


def feed_of(loader: Any, device: torch.device) -> Feed:
    """The feed for a user's loader: one with `batch_at`, with a `state_dict`, or any iterable."""
    if isinstance(loader, IndexedLoader):
        return IndexedFeed(loader)
    if isinstance(loader, StatefulLoader):
        return StatefulFeed(loader)
    if isinstance(loader, Iterable):
        return IterableFeed(loader, device)
    raise UserError(
        f"train_loader is a {type(loader).__name__}: expected an iterable of batches (a DataLoader, a list) "
        "or an object with batch_at(step, micro)"
    )


class IndexedFeed:
    """Batches by (step, micro): the step itself is the position."""

    def __init__(self, loader: IndexedLoader):
        self.loader = loader

    def batches(self, step: int, count: int) -> list[Batch]:
        return [self.loader.batch_at(step, micro) for micro in range(count)]

    def state(self) -> dict[str, Any]:
        return {"kind": "indexed", "fingerprint": _fingerprint(self.loader)}

    def restore(self, state: dict[str, Any]) -> None:
        _expect_kind(state, "indexed")
        _expect_same_data(state, self.loader)


class StatefulFeed:
    """Batches from a loader that keeps its own position, started anew when it ends."""

    def __init__(self, loader: StatefulLoader):
        self.loader = loader
        self.epoch = -1
        self._iterator: Iterator[Batch] = iter(())

    def batches(self, step: int, count: int) -> list[Batch]:
        return [self._next() for _ in range(count)]

    def _next(self) -> Batch:
        batch = next(self._iterator, None)
        if batch is None:
            self._start_epoch(self.epoch + 1)
            batch = next(self._iterator, None)
        if batch is None:
            raise UserError(
                "train_loader gave no batch: it is empty, or cannot be started anew after its end (expected "
                "an iterable with a state_dict, such as a stream)"
            )
        return batch

    def _start_epoch(self, epoch: int) -> None:
        set_epoch = getattr(self.loader, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)
        self._iterator, self.epoch = iter(self.loader), epoch

    def state(self) -> dict[str, Any]:
        position = self.loader.state_dict()
        try:
            json.dumps(position)
        except TypeError as error:
            raise UserError(
                f"train_loader.state_dict() of {type(self.loader).__name__}: {error}: a checkpoint holds "
                "numbers, text, lists and dicts"
            ) from None
        fingerprint = _fingerprint(self.loader)
        return {"kind": "stateful", "epoch": self.epoch, "loader": position, "fingerprint": fingerprint}

    def restore(self, state: dict[str, Any]) -> None:
        _expect_kind(state, "stateful")
        _expect_same_data(state, self.loader)
        if state["epoch"] < 0:
            return
        self.loader.load_state_dict(state["loader"])
        self._start_epoch(state["epoch"])


class IterableFeed:
    """Batches from an iterable, started anew when it ends. Resumed by skipping what was already seen.

    A shuffling loader draws its order from torch's generator when an epoch starts, so that generator's state
    at that moment is part of the position.
    """

    def __init__(self, loader: Iterable[Batch], device: torch.device):
        self.loader = loader
        self.device = device
        self.epoch = -1
        self.taken = 0  # batches of this epoch
        self._iterator: Iterator[Batch] = iter(())
        self._rng_at_epoch: dict[str, Any] | None = None
        self._is_broken = False

    def batches(self, step: int, count: int) -> list[Batch]:
        if self._is_broken:
            self._is_broken = False
            self.restore(self.state())
        position, generators = (self.epoch, self.taken, self._rng_at_epoch), rng.snapshot()
        try:
            return [self._next() for _ in range(count)]
        except WaitBrokenError:
            # As if this step had not been asked for: the checkpoint that follows is of the one before.
            self.epoch, self.taken, self._rng_at_epoch = position
            rng.put_back(generators)
            self._is_broken = True
            raise

    def _next(self) -> Batch:
        batch = next(self._iterator, None)
        if batch is None:
            self._start_epoch(self.epoch + 1)
            batch = next(self._iterator, None)
        if batch is None:
            raise UserError(
                "train_loader gave no batch: it is empty, or an iterator that cannot be started anew "
                "(expected an iterable such as a DataLoader)"
            )
        self.taken += 1
        return batch

    def _start_epoch(self, epoch: int) -> None:
        self._rng_at_epoch = rng.capture(self.device)
        if hasattr(getattr(self.loader, "sampler", None), "set_epoch"):
            self.loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        self._iterator = iter(self.loader)
        self.epoch, self.taken = epoch, 0

    def state(self) -> dict[str, Any]:
        return {
            "kind": "iterable",
            "epoch": self.epoch,
            "taken": self.taken,
            "rng_at_epoch": self._rng_at_epoch,
        }

    def restore(self, state: dict[str, Any]) -> None:
        _expect_kind(state, "iterable")
        if state["epoch"] < 0:
            return
        now = rng.capture(self.device)
        rng.restore(self.device, state["rng_at_epoch"])
        self._start_epoch(state["epoch"])
        self._skip(state["taken"])
        rng.restore(self.device, now)

    def _skip(self, count: int) -> None:
        said_at = time.monotonic()
        for done in range(count):
            if next(self._iterator, None) is None:
                raise UserError(
                    f"train_loader ended after {done} batches, and the checkpoint was made after {count}: "
                    "the data is not what the run was started with"
                )
            if time.monotonic() - said_at > 2.0:
                say(f"resuming: skipped {done + 1:,} of {count:,} batches")
                said_at = time.monotonic()
        self.taken = count


def _fingerprint(loader: Any) -> str | None:
    return getattr(loader, "fingerprint", None)


def _expect_same_data(state: dict[str, Any], loader: Any) -> None:
    saved, own = state.get("fingerprint"), _fingerprint(loader)
    if saved is None and own is not None:
        say("note: the checkpoint does not say which data it was made with; it is taken to be this")
    elif saved != own:
        raise UserError(
            "the training data (data.files in a recipe) is not what the run was started with "
            f"(fingerprint {own}, the checkpoint's is {saved}): "
            "restore the files, or choose another run_dir"
        )


def _expect_kind(state: dict[str, Any], kind: str) -> None:
    if state["kind"] != kind:
        raise UserError(
            f"the checkpoint was made with an {state['kind']} train_loader and this one is {kind}: "
            "give the run the kind of loader it was started with"
        )
