"""Training batches by step, and the position in them that a checkpoint remembers."""

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
    """The feed for a user's loader: one with `batch_at`, or any iterable."""
    if isinstance(loader, IndexedLoader):
        return IndexedFeed(loader)
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
        return {"kind": "indexed", "fingerprint": self._fingerprint()}

    def restore(self, state: dict[str, Any]) -> None:
        _expect_kind(state, "indexed")
        saved, own = state.get("fingerprint"), self._fingerprint()
        if saved is None and own is not None:
            say("note: the checkpoint does not say which data it was made with; it is taken to be this")
        elif saved != own:
            raise UserError(
                "the training data (data.files in a recipe) is not what the run was started with "
                f"(fingerprint {own}, the checkpoint's is {saved}): "
                "restore the files, or choose another run_dir"
            )

    def _fingerprint(self) -> str | None:
        return getattr(self.loader, "fingerprint", None)


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


def _expect_kind(state: dict[str, Any], kind: str) -> None:
    if state["kind"] != kind:
        raise UserError(
            f"the checkpoint was made with an {state['kind']} train_loader and this one is {kind}: "
            "give the run the kind of loader it was started with"
        )
