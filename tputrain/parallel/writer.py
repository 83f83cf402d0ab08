"""Checkpoints of several ranks: each writes its rows, and the first one puts them in place."""

from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

from tputrain.checkpoint.composed import rows_path
from tputrain.checkpoint.integrity import PartDigest, PartDigests, digests_of
from tputrain.checkpoint.pace import no_rest
from tputrain.checkpoint.store import CheckpointStore
from tputrain.checkpoint.tensor_files import Part
from tputrain.errors import in_words
from tputrain.parallel.meeting import Meeting
from tputrain.parallel.world import World
from tputrain.snapshot.background import BackgroundWriter, Written
from tputrain.snapshot.snapshot import Snapshot


class SharedWriter(BackgroundWriter):
    """A BackgroundWriter of all ranks, whose `is_busy` and `finish` are the same on each."""

    def __init__(self, world: World):
        super().__init__()
        self._world, self._is_busy, self._has_ended = world, False, False
        self._meeting: Meeting | None = None

    @property
    def is_busy(self) -> bool:
        return self._is_busy

    @property
    def has_ended(self) -> bool:
        return self._is_busy and self._has_ended

    @property
    def has_ended_here(self) -> bool:
        """Whether the write in flight has come to its end, as the first rank knows."""
        return self._world.is_first and super().has_ended

    def agree(self, has_ended: bool) -> None:
        """Take what all ranks have agreed on."""
        self._has_ended = has_ended

    def start(self, store: CheckpointStore, snapshot: Snapshot) -> None:
        self._is_busy, self._has_ended = True, False
        # Of this write alone: what a process that was killed has left behind must not be taken for its.
        name = self._world.first(lambda: f".unfinished-meeting-{uuid4().hex}")
        self._meeting = Meeting(store.directory / name, self._world.rank, self._world.size)
        super().start(store, snapshot)

    def finish(self, is_alive: Callable[[], None] = no_rest, is_last_try: bool = False) -> Written:
        finish = super().finish
        written = self._world.first(lambda: finish(is_alive, is_last_try))
        if not self._world.is_first:
            self._end_here()
        self._is_busy = self._has_ended = False
        return written

    def _end_here(self) -> None:
        """On a rank that is not the first, which has told what became of the write."""
        assert self._meeting is not None
        self._meeting.is_over.set()
        self.wait()
        self._thread, self._written, bug, self._bug = None, None, self._bug, None
        if bug is not None:
            raise bug

    def _copy_to_mirror(self, store: CheckpointStore, path: Path) -> str | None:
        return super()._copy_to_mirror(store, path) if self._world.is_first else None

    def _store(
        self,
        store: CheckpointStore,
        snapshot: Snapshot,
        rest: Callable[[], None],
        written: Callable[[], None],
    ) -> None:
        meeting = self._meeting
        assert meeting is not None
        try:
            if self._world.is_first:
                self._store_all(store, snapshot, rest, written, meeting)
            else:
                directory = store.unfinished(snapshot.step)
                meeting.wait_for_begin()
                own = self._write_rows(directory, snapshot, meeting)
                written()
                meeting.say("digests", digests_of(directory, own, rest))
        except Exception as error:
            meeting.say_failed(in_words(error))
            raise

    def _store_all(
        self,
        store: CheckpointStore,
        snapshot: Snapshot,
        rest: Callable[[], None],
        written: Callable[[], None],
        meeting: Meeting,
    ) -> None:
        own: list[Part] = []
        is_composed = not self._world.keeps_rows

        def fill(directory: Path) -> None:
            if is_composed:
                snapshot.create_without_tensors(directory)
            else:
                own.extend(snapshot.create(directory))
            meeting.begin()
            own.extend(self._write_rows(directory, snapshot, meeting))
            meeting.of_all("written")
            for rank in range(self._world.size):
                rows_path(directory, rank).unlink(missing_ok=True)

        def parts(directory: Path) -> PartDigests:
            found: dict[str, list[PartDigest]] = {}
            for digests in meeting.of_all("digests", digests_of(directory, own, rest)):
                for name, theirs in digests.items():
                    found.setdefault(name, []).extend(PartDigest(*each) for each in theirs)
            return found

        num_bytes = snapshot.num_bytes * (2 if is_composed else 1)
        store.write(snapshot.step, fill, num_bytes, rest, written, parts)
        meeting.end()

    def _write_rows(self, directory: Path, snapshot: Snapshot, meeting: Meeting) -> list[Part]:
        """Write this rank's rows. Returns the bytes that it vouches for."""
        if self._world.keeps_rows:
            own = snapshot.write_rows(directory)
        else:
            apart = snapshot.write_rows_apart(directory, self._world.rank)
            meeting.say("rows", apart)
            parts_of = [[Part(*each) for each in parts] for parts in meeting.of_all("rows", apart)]
            own = snapshot.compose(directory, parts_of, self._world.rank)
        meeting.say("written")
        return own
