"""Checkpoints of several ranks: the first one writes, and all know what became of it."""

from collections.abc import Callable

from tputrain.checkpoint.background import BackgroundWriter, Written
from tputrain.checkpoint.pace import no_rest
from tputrain.checkpoint.snapshot import Snapshot
from tputrain.checkpoint.store import CheckpointStore
from tputrain.parallel.world import World


class SharedWriter(BackgroundWriter):
    """A BackgroundWriter whose `is_busy` and `finish` are the same on all ranks."""

    def __init__(self, world: World):
        super().__init__()
        self._world, self._is_busy, self._has_ended = world, False, False

    @property
    def is_busy(self) -> bool:
        return self._is_busy

    @property
    def has_ended(self) -> bool:
        return self._is_busy and self._has_ended

    @property
    def has_ended_here(self) -> bool:
        """Whether the write in flight is this rank's, and has ended."""
        return super().has_ended

    def agree(self, has_ended: bool) -> None:
        """Take what all ranks have agreed on."""
        self._has_ended = has_ended

    def start(self, store: CheckpointStore, snapshot: Snapshot) -> None:
        self._is_busy, self._has_ended = True, False
        if self._world.is_first:
            super().start(store, snapshot)

    def finish(self, is_alive: Callable[[], None] = no_rest) -> Written:
        finish = super().finish
        written = self._world.first(lambda: finish(is_alive))
        self._is_busy = self._has_ended = False
        return written
