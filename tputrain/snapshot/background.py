"""Checkpoints written by a thread, one at a time, while training goes on."""

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, NoReturn

from safetensors import SafetensorError

from tputrain.announce import say, warn
from tputrain.checkpoint.mirror import Mirror, warn_not_copied
from tputrain.checkpoint.pace import Pace, no_rest
from tputrain.checkpoint.store import CheckpointStore
from tputrain.errors import in_words
from tputrain.snapshot.snapshot import Snapshot

_LONGEST_REST = 60.0  # seconds by which a checkpoint may be late on the disk
_LONGEST_WAIT = 0.1  # seconds that a step waits for the files


class Written(NamedTuple):
    """What became of a write."""

    path: Path
    """Where the checkpoint is, or should have been."""
    error: str | None
    """What the disk said; None: the checkpoint is complete."""
    mirror_error: str | None
    """What the mirror said; None: it has the checkpoint too, or there is no mirror."""
    seconds: float


class BackgroundWriter:
    """Writes snapshots into a store, at most one at a time.

    The files are written at once: from then on they outlive this process (`tputrain.checkpoint.unsealed`).
    Forcing them to the disk and hashing them takes its time, up to a quarter of what lies between two
    checkpoints, until it is waited for.
    """

    def __init__(self) -> None:
        self._began_at = time.monotonic()  # the write before, or the run
        self._pace = Pace(0.0)
        self._mirror: Mirror | None = None
        self._thread: threading.Thread | None = None
        self._files_written: threading.Event | None = None
        self._stored = threading.Event()  # the write in flight is, but for the mirror
        self._stored.set()
        self._written: Written | None = None
        self._bug: BaseException | None = None
        self._failure: str | None = None  # of the last write, known before the mirror's part is done

    @property
    def is_busy(self) -> bool:
        """Whether there is a write to `finish`."""
        return self._thread is not None

    @property
    def has_ended(self) -> bool:
        """Whether there is one, and it need not be waited for."""
        return self._thread is not None and not self._thread.is_alive()

    def start(self, store: CheckpointStore, snapshot: Snapshot) -> None:
        """Begin to write; the write before must have been finished."""
        assert self._thread is None, "a checkpoint is being written already"
        now = time.monotonic()
        self._pace, self._began_at = Pace(min((now - self._began_at) / 4, _LONGEST_REST)), now
        # No daemon: the interpreter waits for it, so that an exit does not cut a checkpoint off.
        self._mirror, self._files_written = store.mirror, threading.Event()
        self._stored.clear()
        self._thread = threading.Thread(
            target=self._write, args=(store, snapshot, self._files_written), name="checkpoint"
        )
        self._thread.start()

    def let_write(self) -> None:
        """Once after a `start`, wait until its files outlive this process, a tenth of a second at most.

        Called while the device has a step to do and before that step counts: it is not idle meanwhile, and a
        SIGKILL afterwards costs no more than that step.
        """
        if self._files_written is not None:
            self._files_written.wait(_LONGEST_WAIT)
            self._files_written = None

    def finish(self, is_alive: Callable[[], None] = no_rest, is_last_try: bool = False) -> Written:
        """Wait for the write in flight, and say what became of it; a failure with `is_last_try` is left to
        the caller, who raises it. `is_alive` as in `wait`.

        Raises what was raised in it, where that was not the disk's fault.
        """
        assert self._thread is not None, "no checkpoint is being written"
        self.wait(is_alive)
        written, bug, self._thread, self._written, self._bug = self._written, self._bug, None, None, None
        if bug is not None:
            raise bug
        assert written is not None
        if written.error is None:
            say(f"saved {written.path} in {written.seconds:.1f} s")
        elif not is_last_try:
            warn(
                f"tputrain: {written.path} NOT SAVED: {written.error}; the next occasion tries again, "
                "and what was saved before stays"
            )
        if written.mirror_error is not None:
            warn_not_copied(written.path, written.mirror_error)
        return written

    def wait(self, is_alive: Callable[[], None] = no_rest) -> None:
        """Wait for the write in flight, if any; it is still there to be finished. `is_alive()` is called
        from time to time while a copy to the mirror, which may take any time, makes progress.
        """
        self._pace.hurry()
        num_moved = 0
        while self._thread is not None and self._thread.is_alive():
            self._thread.join(1.0)
            if self._mirror is not None and self._mirror.num_moved != num_moved:
                num_moved = self._mirror.num_moved
                is_alive()

    def leaving_with(self, store: CheckpointStore, snapshot: Snapshot | None) -> Callable[[int], NoReturn]:
        """A rescue for `SignalWatch.rescue_by`: write `snapshot` (None: it is on the disk, or the write in
        flight brings it there) and leave, with exit code 1 where the disk does not take it.
        """

        def leave(number: int) -> NoReturn:
            self._pace.hurry()
            self._stored.wait()
            path, failure = "the checkpoint that was being written", self._failure
            if snapshot is not None:
                path, failure = str(store.path(snapshot.step)), None
                try:
                    store.write(snapshot.step, snapshot.fill, snapshot.num_bytes)
                except (OSError, SafetensorError) as error:
                    failure = in_words(error)
            if failure is not None:
                warn(f"tputrain: {path} cannot be saved ({failure}): leaving without it")
                os._exit(1)
            warn("what is being prepared takes longer: leaving with the checkpoint of the state before it")
            os._exit(128 + number)

        return leave

    def _store(
        self,
        store: CheckpointStore,
        snapshot: Snapshot,
        rest: Callable[[], None],
        written: Callable[[], None],
    ) -> None:
        """Bring `snapshot` into the store. Raises OSError where the disk does not take it."""
        store.write(snapshot.step, snapshot.fill, snapshot.num_bytes, rest, written)

    def _copy_to_mirror(self, store: CheckpointStore, path: Path) -> str | None:
        """What went wrong, in one line; None: nothing, or there is no mirror."""
        return None if store.mirror is None else store.mirror.push(path, store.keeps)

    def _write(self, store: CheckpointStore, snapshot: Snapshot, files_written: threading.Event) -> None:
        began, error, mirror_error = time.perf_counter(), None, None
        try:
            self._store(store, snapshot, self._pace.rest, files_written.set)
        except (OSError, SafetensorError) as failure:
            error = in_words(failure)
        except BaseException as bug:
            self._bug = bug
        files_written.set()  # or there will be none
        self._failure = error if self._bug is None else f"{type(self._bug).__name__}: {self._bug}"
        self._stored.set()
        seconds = time.perf_counter() - began
        path = store.path(snapshot.step)
        if error is None and self._bug is None:
            mirror_error = self._copy_to_mirror(store, path)
        self._written = Written(path, error, mirror_error, seconds)
