"""Training batches by step, and the position in them that a checkpoint remembers."""

import copy
import math
import time
from collections.abc import Iterable, Iterator
from typing import Any, Protocol, runtime_checkable

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from tputrain import rng
from tputrain.announce import say
from tputrain.batches import Batch
from tputrain.errors import UserError


@runtime_checkable
class IndexedLoader(Protocol):
    """A loader whose batches are a pure function of the step: resuming needs no skipping.

    One that has a `fingerprint` (text that names its data) is asked for the same at a resume. One that has
    `epochs_at(step)` tells how many epochs (a float) the steps before `step` come to.
    """

    def batch_at(self, step: int, micro: int) -> Batch:
        """Micro-batch `micro` of step `step`, both from 0."""


@runtime_checkable
class StatefulLoader(Protocol):
    """An iterable of batches that knows its own position: a stream, torchdata's StatefulDataLoader.

    Its position is asked before each step. One that has a `fingerprint` is asked for the same at a resume.
    One that has `can_read_ahead = True` is asked for batches a step early: it draws from no generator of the
    process.
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
        """The `count` micro-batches of step `step` (from 0), on the host."""

    def epoch_of(self, step: int) -> int | None:
        """The epoch (from 0) of the last batch of `step`, which was given last; None: not known."""

    def epochs_after(self, step: int) -> float | None:
        """How many epochs the batches up to the last one of `step` come to; None: not known."""

    def can_draw_ahead(self, count: int) -> bool:
        """Whether the next `count` batches, and all random numbers, are the same if they are drawn now."""

    @property
    def can_go_back(self) -> bool:
        """Whether `restore` works in the process that has gone on from there, too."""

    def state(self) -> dict[str, Any]:
        """The position after the last batches given."""

    def restore(self, state: dict[str, Any]) -> None:
        """Go to a position that `state` gave, also after something broke off `batches`."""


def feed_of(loader: Any, device: torch.device) -> Feed:
    """The feed for a user's loader: one with `batch_at`, with a `state_dict`, or any iterable.

    The latter two, their samplers and their dataset are told each epoch, from 0, if they have `set_epoch`.
    """
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

    can_go_back = True

    def __init__(self, loader: IndexedLoader):
        self.loader = loader

    def batches(self, step: int, count: int) -> list[Batch]:
        return [self.loader.batch_at(step, micro) for micro in range(count)]

    def epoch_of(self, step: int) -> int | None:
        epochs = self.epochs_after(step)
        return None if epochs is None else max(0, math.ceil(epochs) - 1)

    def epochs_after(self, step: int) -> float | None:
        epochs_at = getattr(self.loader, "epochs_at", None)
        return epochs_at(step + 1) if callable(epochs_at) else None

    def can_draw_ahead(self, count: int) -> bool:
        return True

    def state(self) -> dict[str, Any]:
        return {"kind": "indexed", "fingerprint": _fingerprint(self.loader)}

    def restore(self, state: dict[str, Any]) -> None:
        _expect_kind(state, "indexed")
        _expect_same_data(state, self.loader)


class StatefulFeed:
    """Batches from a loader that keeps its own position, started anew when it ends."""

    can_go_back = True

    def __init__(self, loader: StatefulLoader):
        self.loader = loader
        self.epoch = -1
        self._iterator: Iterator[Batch] = iter(())

    def batches(self, step: int, count: int) -> list[Batch]:
        return [self._next() for _ in range(count)]

    def epoch_of(self, step: int) -> int | None:
        return self.epoch

    def epochs_after(self, step: int) -> float | None:
        return None  # its length is not known

    def can_draw_ahead(self, count: int) -> bool:
        return getattr(self.loader, "can_read_ahead", False) is True

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
        _tell_epoch(self.loader, epoch)
        self._iterator, self.epoch = iter(self.loader), epoch

    def state(self) -> dict[str, Any]:
        position = copy.deepcopy(self.loader.state_dict())
        fingerprint = _fingerprint(self.loader)
        return {"kind": "stateful", "epoch": self.epoch, "loader": position, "fingerprint": fingerprint}

    def restore(self, state: dict[str, Any]) -> None:
        _expect_kind(state, "stateful")
        _expect_same_data(state, self.loader)
        if state["epoch"] < 0 and self.epoch < 0:
            return  # nothing was given then, nor since
        _end(self._iterator)
        self.loader.load_state_dict(state["loader"])
        if state["epoch"] < 0:
            self._iterator, self.epoch = iter(()), -1
        else:
            self._start_epoch(state["epoch"])


class IterableFeed:
    """Batches from an iterable, started anew when it ends. Resumed by skipping what was already seen.

    A shuffling loader draws its order from torch's generator, or from its own, when an epoch starts, so their
    states at that moment are part of the position.
    """

    def __init__(self, loader: Iterable[Batch], device: torch.device):
        self.loader = loader
        self.device = device
        self.epoch = -1
        self.taken = 0  # batches of this epoch
        self._given = 0  # by this object, in all epochs
        self._iterator: Iterator[Batch] = iter(())
        self._rng_at_epoch: dict[str, Any] | None = None
        self._own_at_epoch = _states_of(generators_of(loader))  # before the first epoch: as they are given

    def batches(self, step: int, count: int) -> list[Batch]:
        return [self._next() for _ in range(count)]

    @property
    def can_go_back(self) -> bool:
        return not isinstance(self.loader, Iterator)  # what is left of it, nobody can give again

    def epoch_of(self, step: int) -> int | None:
        return self.epoch

    def epochs_after(self, step: int) -> float | None:
        length = _length(self.loader)
        return None if length is None else self.epoch + self.taken / length

    def can_draw_ahead(self, count: int) -> bool:
        # Within an epoch: an order is drawn where one starts.
        return (
            _is_put_together_by_workers(self.loader)
            and self.epoch >= 0
            and self.taken + count <= len(self.loader)  # type: ignore[arg-type]
        )

    def _next(self) -> Batch:
        batch = next(self._iterator, None)
        if batch is None:
            self._start_epoch(self.epoch + 1)
            batch = next(self._iterator, None)
        if batch is None and isinstance(self.loader, Iterator):
            raise UserError(
                f"train_loader is a {type(self.loader).__name__} that ended after {self._given} batches and "
                "cannot be started anew: expected an iterable such as a list, a DataLoader, or an object "
                "whose __iter__ makes a new generator"
            )
        if batch is None:
            raise UserError(f"train_loader gave no batch in epoch {self.epoch}: it is empty")
        self.taken += 1
        self._given += 1
        return batch

    def _start_epoch(self, epoch: int) -> None:
        self._rng_at_epoch = rng.capture(self.device)
        self._own_at_epoch = _states_of(generators_of(self.loader))
        _tell_epoch(self.loader, epoch)
        self._iterator = iter(self.loader)
        self.epoch, self.taken = epoch, 0

    def state(self) -> dict[str, Any]:
        return {
            "kind": "iterable",
            "epoch": self.epoch,
            "taken": self.taken,
            "batch_size": _batch_size(self.loader),
            "is_over": self.taken == _length(self.loader),
            "rng_at_epoch": self._rng_at_epoch,
            "own_rng_at_epoch": self._own_at_epoch,
        }

    def restore(self, state: dict[str, Any]) -> None:
        _expect_kind(state, "iterable")
        if not self.can_go_back and self._given > 0 and state["taken"] == self.taken:
            return  # an iterator, in the process that has taken so many of it: it stands there
        _end(self._iterator)
        self._iterator = iter(())  # what reads for it, such as workers, ends before another begins
        own = state.get("own_rng_at_epoch", [])  # the first checkpoints of all had none
        for generator, saved in zip(generators_of(self.loader), own, strict=False):
            generator.set_state(rng.from_hex(saved))
        if state["epoch"] < 0:
            self._iterator, self.epoch, self.taken = iter(()), -1, 0
            return
        now = rng.capture(self.device)
        rng.restore(self.device, state["rng_at_epoch"])
        self._start_epoch(state["epoch"])
        count = self._taken_of(state)
        self._skip(count, may_end=count != state["taken"])
        rng.restore(self.device, now)

    def _taken_of(self, state: dict[str, Any]) -> int:
        """How many batches of the epoch hold what was given by then, if they have another size now."""
        taken, before, now = state["taken"], state.get("batch_size"), _batch_size(self.loader)
        if before is None or now is None or before == now:
            return taken
        count, again = divmod(taken * before, now)
        whole = _length(self.loader)
        if whole is not None and (count >= whole or state["is_over"]):  # its last batch may have been short
            count, again = whole, 0
        repeated = f"; samples that come again: {again}" if again else ""
        say(
            f"note: train_loader's batch_size is {now}, and was {before}: its epoch goes on after "
            f"{count:,} batches in place of {taken:,}{repeated}"
        )
        return count

    def _skip(self, count: int, may_end: bool) -> None:
        said_at = time.monotonic()
        for done in range(count):
            if next(self._iterator, None) is None:
                if may_end:
                    count = done
                    break
                raise UserError(
                    f"train_loader ended after {done} batches, and the checkpoint was made after {count}: "
                    "the data is not what the run was started with"
                )
            if time.monotonic() - said_at > 2.0:
                say(f"resuming: skipped {done + 1:,} of {count:,} batches")
                said_at = time.monotonic()
        self.taken = count


def _batch_size(loader: Any) -> int | None:
    """Samples of a batch, where the loader says so as a DataLoader does."""
    size = getattr(loader, "batch_size", None) or getattr(
        getattr(loader, "batch_sampler", None), "batch_size", None
    )
    return size if isinstance(size, int) and size > 0 else None


def _length(loader: Any) -> int | None:
    """Batches of an epoch; None where only going through them counts them."""
    try:
        return len(loader)
    except TypeError:
        return None


def _end(iterator: Iterator[Batch]) -> None:
    """Have a generator leave its loader alone before that is gone through anew."""
    if callable(close := getattr(iterator, "close", None)):
        close()


def _is_put_together_by_workers(loader: Any) -> bool:
    """Whether a batch of `loader` costs this process no random number, and how many there are is known."""
    return (
        isinstance(loader, DataLoader)
        and type(loader).__iter__ is DataLoader.__iter__
        and loader.num_workers > 0
        and not isinstance(loader.dataset, IterableDataset)
        and type(loader.batch_sampler) is BatchSampler
        and type(loader.sampler).__module__.startswith("torch.utils.data")  # draws once, in the beginning
    )


def generators_of(loader: Any) -> list[torch.Generator]:
    """What a DataLoader and its samplers draw from beside torch's generator, each once."""
    found = (getattr(each, "generator", None) for each in _with_samplers(loader))
    return list({id(each): each for each in found if isinstance(each, torch.Generator)}.values())


def _tell_epoch(loader: Any, epoch: int) -> None:
    """Call `set_epoch` of whatever orders the samples, each object once."""
    listeners = (*_with_samplers(loader), getattr(loader, "dataset", None))
    for each in {id(each): each for each in listeners}.values():
        if callable(set_epoch := getattr(each, "set_epoch", None)):
            set_epoch(epoch)


def _with_samplers(loader: Any) -> tuple[Any, ...]:
    """A DataLoader and its samplers; of another loader, those of these that it has, and None for others."""
    sampler, batch_sampler = (getattr(loader, name, None) for name in ("sampler", "batch_sampler"))
    return loader, sampler, batch_sampler, getattr(batch_sampler, "sampler", None)


def _states_of(generators: Iterable[torch.Generator]) -> list[str]:
    return [rng.to_hex(each.get_state()) for each in generators]


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
