"""`World` is a run of one process; `Ranks` is one of several."""

import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from functools import cache
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tputrain.announce import be_quiet, say
from tputrain.batches import Batch
from tputrain.device import failure_of_peers, is_absent, peers
from tputrain.errors import RunFailedError, UserError
from tputrain.models.sequence import SplitSequence
from tputrain.optim.given import train_parts
from tputrain.parallel.config import ParallelConfig
from tputrain.parallel.launched import is_launched, is_ours
from tputrain.parallel.slices import columns, rounds, slices

T = TypeVar("T")
_SECONDS_TO_HEAR = 5.0  # of why another rank has gone


class World:
    """All ranks of a run. This class is a run of one process; `Ranks` is one of several.

    Each method is to be called by all ranks, in the same order.
    """

    size = 1
    rank = 0
    data_size = 1
    """Parts that the samples of a batch are divided into."""
    context_size = 1
    """Parts that each sequence of these is divided into, of ranks that follow each other."""
    tensor_size = 1
    """Ranks that share the matrices of a layer."""
    data_rank = 0
    """The number of this rank's part of a batch."""
    keeps_rows = True
    """Whether the run directory keeps what several ranks write into one file, as `check_shared` has found."""
    sequence: SplitSequence | None = None
    """The ranks that share this one's sequences; None: there are no others."""

    @property
    def is_first(self) -> bool:
        """Whether this rank is the one that writes and speaks."""
        return self.rank == 0

    def slices(self, batch: Batch) -> list[Batch]:
        """The batch (on the host) as its parts, all of one shape."""
        return [batch]

    def rounds(self, batch: Batch) -> list[list[Batch | None]]:
        """The same of a batch that need not divide: in each round parts of one shape (None: no samples)."""
        return [[batch]]

    def parallelise(
        self, model: nn.Module, compile_block: Callable[[nn.Module], None], optimizer: Optimizer | None = None
    ) -> None:
        """Lay the model, which is on its device, and an optimizer built on it out over ranks, in place."""

    def mean(self, value: Tensor) -> Tensor:
        """The mean of a tensor on the device over all ranks. Nothing is read."""
        return value

    def total(self, value: Tensor) -> Tensor:
        """The sum of a tensor on the device over the parts of a batch. Nothing is read."""
        return value

    def largest(self, values: Sequence[int]) -> list[int]:
        """Element by element the largest of all ranks, by way of the hosts: no device is waited for."""
        return list(values)

    def of_all(self, value: T) -> list[T]:
        """What each rank gives, in their order, by way of the hosts."""
        return [value]

    def check_shared(self, directory: Path) -> None:
        """Raise UserError where a rank does not see what the first one writes in `directory`; else find out
        whether it keeps what several ranks write into one file.
        """

    def meet(self, what: str) -> None:
        """Return when all ranks have done `what`, which may take hours: no timeout counts."""

    def first(self, function: Callable[[], T]) -> T:
        """The result of `function` on the first rank; a UserError that it raises there is raised on all.

        It may take hours, such as the copy of a checkpoint to or from its mirror: no timeout counts.
        """
        return function()


ALONE = World()


class Ranks(World):
    """One of several ranks, in a process group that has begun."""

    def __init__(self, cfg: ParallelConfig):
        import torch.distributed as dist

        self._dist = dist
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._plan, self._placement = cfg.plan, cfg.placement
        if not cfg.auto:
            self.divide(cfg.resolved(self.size), range(self.size))

    def divided(self, degrees: Mapping[str, int], order: Sequence[int]) -> "Ranks":
        """The same ranks in another mesh."""
        found = copy(self)
        found.divide(degrees, order)
        return found

    def divide(self, degrees: Mapping[str, int], order: Sequence[int]) -> None:
        """Make the mesh of ranks: they are given in its order (replicate, shard, context, tensor)."""
        from torch.distributed.device_mesh import DeviceMesh

        further = [name for name in ("context", "tensor") if degrees[name] > 1]
        names = ("replicate", "shard", *further)
        ranks = torch.tensor(order).reshape([degrees[name] for name in names])
        self._mesh = DeviceMesh("tpu", ranks, mesh_dim_names=names)
        # Ranks that share layers follow each other, and share their part of the batch.
        self.data_rank = list(order).index(self.rank) // degrees["tensor"]
        self.data_size = degrees["replicate"] * degrees["shard"]
        self.context_size, self.tensor_size = degrees["context"], degrees["tensor"]
        if self.context_size > 1:
            context = self._mesh["context"]
            self.sequence = SplitSequence(
                context.get_group(), context.size(), context.get_local_rank(), torch.device("tpu")
            )

    def slices(self, batch: Batch) -> list[Batch]:
        return [part for rows in slices(batch, self.data_size) for part in columns(rows, self.context_size)]

    def rounds(self, batch: Batch) -> list[list[Batch | None]]:
        return [
            [part for rows in each for part in columns(rows, self.context_size)]
            for each in rounds(batch, self.data_size)
        ]

    def parallelise(
        self, model: nn.Module, compile_block: Callable[[nn.Module], None], optimizer: Optimizer | None = None
    ) -> None:
        from tputrain.parallel.apply import apply_plan

        names = {id(parameter): name for name, parameter in model.named_parameters()}
        apply_plan(model, self._mesh, self._plan, self._placement, compile_block)
        if optimizer is not None:
            train_parts(optimizer, model, names)

    def mean(self, value: Tensor) -> Tensor:
        mean = value.detach().clone()
        # Along one axis after the other: a region's groups have to be of its mesh, and the order of the
        # world's ranks may be another one.
        for dim in range(self._mesh.ndim):
            if self._mesh.size(dim) > 1:
                self._dist.all_reduce(mean, self._dist.ReduceOp.AVG, group=self._mesh.get_group(dim))
        return mean

    def total(self, value: Tensor) -> Tensor:
        total = value.detach().clone()
        names = self._mesh.mesh_dim_names or ()
        for name in (each for each in names if each != "tensor"):  # tensor ranks have one part of the batch
            self._dist.all_reduce(total, group=self._mesh.get_group(name))
        return total

    def largest(self, values: Sequence[int]) -> list[int]:
        largest = torch.tensor(values)
        with _exchanging("the largest of all ranks"):
            self._dist.all_reduce(largest, self._dist.ReduceOp.MAX)
        return largest.tolist()

    def of_all(self, value: T) -> list[T]:
        found: list[Any] = [None] * self.size
        with _exchanging("what each rank has"):
            self._dist.all_gather_object(found, value)
        return found

    def meet(self, what: str) -> None:
        try:
            peers().meet(what)
        except RuntimeError as error:
            raise RunFailedError(str(error)) from error

    def check_shared(self, directory: Path) -> None:
        mark = directory / self.first(lambda: _leave_mark(directory, self.size))
        is_seen = mark.exists()
        with _written_into(mark, self.rank) as is_written:
            seen = self.of_all((socket.gethostname(), is_seen))  # all have it open at once
        self.of_all(None)
        kept = self.of_all(is_written and _is_whole(mark, self.size))
        self.first(lambda: mark.unlink(missing_ok=True))
        for rank, (host, is_seen) in enumerate(seen):
            if not is_seen:
                raise UserError(
                    f"run_dir={directory}: rank {rank} on {host} does not see what rank 0 on {seen[0][0]} "
                    "writes there: expected a directory that all ranks share"
                )
        self.keeps_rows = all(kept)
        if not self.keeps_rows:
            say(
                f"run_dir={directory} does not keep what several ranks write into one file, as a mounted "
                "bucket: each rank writes a file of its own, and the files of a checkpoint are put together "
                "from these"
            )

    def first(self, function: Callable[[], T]) -> T:
        shared: list[Any] = [None, None]
        if self.is_first:
            try:
                shared[0] = function()
            except UserError as error:
                shared[1] = str(error)
        self.meet("what the first rank does for all")
        with _exchanging("what the first rank has"):
            self._dist.broadcast_object_list(shared, src=0)
        if shared[1] is not None:
            raise UserError(shared[1])
        return shared[0]


class AbsentRanks(Ranks):
    """One of the ranks of a slice that is not here. Hosts that are not there say what this one says."""

    def largest(self, values: Sequence[int]) -> list[int]:
        return list(values)

    def of_all(self, value: T) -> list[T]:
        return [value] * self.size

    def meet(self, what: str) -> None:
        pass

    def check_shared(self, directory: Path) -> None:
        pass

    def first(self, function: Callable[[], T]) -> T:
        return function()


@contextmanager
def _exchanging(what: str) -> Iterator[None]:
    """An exchange between the hosts of all ranks. It knows neither who is late nor whose end has closed a
    connection, and why; the device does.
    """
    peers().exchange(f"an exchange of {what}")
    try:
        yield
    except RuntimeError as error:
        failure = failure_of_peers(_SECONDS_TO_HEAR)
        if failure is None:
            raise
        raise RunFailedError(failure) from error


_BETWEEN_WRITES = 1 << 16  # bytes: more than a page or a block, of which a file system may write all


def _leave_mark(directory: Path, num_ranks: int) -> str:
    name = f".shared-{uuid4().hex}"
    try:
        with (directory / name).open("xb") as file:
            file.truncate(num_ranks * _BETWEEN_WRITES)
    except OSError as error:
        raise UserError(f"run_dir={directory}: cannot write there ({error.strerror}); take another") from None
    return name


@contextmanager
def _written_into(mark: Path, rank: int) -> Iterator[bool]:
    """Write as a rank writes its rows of a checkpoint; the file is closed after the context. Gives whether
    that can be done.
    """
    descriptor = -1
    try:
        descriptor = os.open(mark, os.O_WRONLY)
        os.pwrite(descriptor, b"\1", rank * _BETWEEN_WRITES)
        is_written = True
    except OSError:
        is_written = False
    try:
        yield is_written
    finally:
        if descriptor >= 0:
            with suppress(OSError):
                os.close(descriptor)


def _is_whole(mark: Path, num_ranks: int) -> bool:
    """Whether what each rank has written is there."""
    try:
        with mark.open("rb", buffering=0) as file:
            return all(
                os.pread(file.fileno(), 1, rank * _BETWEEN_WRITES) == b"\1" for rank in range(num_ranks)
            )
    except OSError:
        return False


@cache
def _ranks(cfg: ParallelConfig, group: Any) -> Ranks:
    """Of a group, made once: the command, the data and the Trainer all ask."""
    return AbsentRanks(cfg) if is_absent() else Ranks(cfg)


def _world_size() -> int:
    if is_absent():
        import torch.distributed as dist

        return dist.get_world_size()
    return int(os.environ["WORLD_SIZE"]) if is_launched() else 1


def join(cfg: ParallelConfig, device: torch.device) -> World:
    """Take part in the run of all ranks that were started; alone in one of one process.

    Before the first use of the device. Raises UserError where the degrees do not fit the ranks.
    """
    world_size = _world_size()
    if not cfg.auto:
        cfg.resolved(world_size)
    if world_size == 1:
        return ALONE
    if device.type != "tpu":
        raise UserError(f"device={device.type}: expected tpu with {world_size} processes (parallel.*)")
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group("cpu:gloo,tpu:tpu")
    ranks = _ranks(cfg, dist.group.WORLD)
    if not (ranks.is_first or is_ours()):
        be_quiet()
    return ranks
