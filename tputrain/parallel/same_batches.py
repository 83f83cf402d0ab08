"""Whether all ranks are given the same batches, of which each takes its rows: agreed on by way of the hosts.

A rank that is given others, or none any more, ends the run of all of them, with one line.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import blake2b
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from tputrain import batches as batch_of
from tputrain.batches import Batch
from tputrain.errors import UserError
from tputrain.parallel.world import World

T = TypeVar("T")
_NONE = 0  # no digest: the data has ended
_MOST = 8192  # elements of a tensor that are looked at
_EXPECTED = (
    "expected the same on all ranks, of which each takes its rows: no DistributedSampler, no part of the "
    "data for each rank, and one seed for what shuffles"
)


def drawn_alike(world: World, what: str, draw: Callable[[], T], batches: Callable[[T], Sequence[Batch]]) -> T:
    """What `draw` gives, once all ranks know that theirs holds the same `batches`; none: the data has ended.

    Raises UserError on all ranks where it does not, or where `draw` raises one on any of them.
    """
    if world.size == 1:
        return draw()
    drawn, digest, mistake = None, _NONE, None
    try:
        drawn = draw()
        digest = digest_of(batches(drawn))
    except UserError as error:
        mistake = str(error)
    largest, negated_smallest, is_mistaken = world.largest([digest, -digest, int(mistake is not None)])
    if is_mistaken:
        _raise_first(world.of_all(mistake))
    if largest != -negated_smallest:
        _raise_difference(what, world.of_all(digest))
    return drawn  # type: ignore[return-value]


def given_alike(world: World, what: str, given: Iterable[Batch]) -> Iterator[Batch]:
    """The batches of a loader, each once all ranks know that they were given the same."""
    iterator = iter(given)
    while (
        batch := drawn_alike(
            world, what, lambda: next(iterator, None), lambda drawn: [] if drawn is None else [drawn]
        )
    ) is not None:
        yield batch


def check_loader(loader: Any, what: str, world: World, equal: bool) -> None:
    """Raise UserError for a loader whose batches would not be the same on all ranks or, where slices are to
    be `equal`, would not divide among them: now, and not at the end of an epoch.
    """
    if world.size == 1 or not isinstance(loader, DataLoader):
        return
    sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
    if isinstance(sampler, DistributedSampler):
        raise UserError(
            f"{what}: its DistributedSampler gives each rank other samples: expected none (shuffle=True "
            "instead), as each rank reads the same batches and takes its rows"
        )
    if not equal or loader.batch_size is None:
        return
    try:
        last = 0 if loader.drop_last else len(sampler) % loader.batch_size  # type: ignore[arg-type]
    except TypeError:
        last = 0  # nobody knows before it has come
    for name, samples in (("batch_size", loader.batch_size), ("the last batch of an epoch", last)):
        if samples % world.data_size:
            mend = f"a multiple of {world.data_size}" if name == "batch_size" else "drop_last=True"
            raise UserError(
                f"{what}: {name}: {samples} samples do not divide among {world.data_size} ranks: "
                f"expected {mend}"
            )


def digest_of(batches: Sequence[Batch]) -> int:
    """63 bits: of the shapes of the batches, and of a share of what each is to be compared with."""
    if not batches:
        return _NONE
    digest = blake2b(digest_size=8)
    for batch in batches:
        digest.update(repr(batch_of.form(batch)).encode())
        target = batch_of.target_of(batch)
        for tensor in _tensors(batch if target is None else target):
            flat = tensor.detach().reshape(-1)
            some = flat[:: max(1, len(flat) // _MOST)].contiguous()
            digest.update(some.view(torch.uint8).numpy().data)
    return int.from_bytes(digest.digest(), "little") >> 1 | 1


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _tensors(each)


def _raise_first(mistakes: list[str | None]) -> None:
    rank, mistake = next((rank, text) for rank, text in enumerate(mistakes) if text is not None)
    of_one = any(each != mistake for each in mistakes)
    raise UserError(f"rank {rank}: {mistake}" if of_one else str(mistake))


def _raise_difference(what: str, digests: list[int]) -> None:
    rank = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
    if _NONE in (digests[0], digests[rank]):
        ended, other = (0, rank) if digests[0] == _NONE else (rank, 0)
        raise UserError(f"{what} has ended on rank {ended} and gives rank {other} another batch: {_EXPECTED}")
    raise UserError(f"{what} gives rank {rank} another batch than rank 0: {_EXPECTED}")
