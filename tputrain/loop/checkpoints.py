"""The checkpoints of a Trainer's run: written while it goes on, gone on from, gone back to."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TypeVar

from safetensors import SafetensorError

from tputrain.announce import say
from tputrain.checkpoint.store import CheckpointStore, damage
from tputrain.errors import RunFailedError, UserError, in_words
from tputrain.loop.run_state import RunState
from tputrain.run_lock import RunLock, is_locked
from tputrain.snapshot import contents
from tputrain.snapshot.background import BackgroundWriter, Written
from tputrain.snapshot.snapshot import Snapshot
from tputrain.watchdog import SAVING, Watchdog

if TYPE_CHECKING:
    from tputrain.trainer import Trainer

T = TypeVar("T")
_FARTHEST = 1000  # steps that are done again for want of a checkpoint


class Checkpoints:
    """Saves the state of a Trainer and loads it, in a run directory that is this Trainer's alone meanwhile.

    Without a run directory nothing is saved.
    """

    def __init__(
        self,
        trainer: "Trainer",
        state: RunState,
        writer: BackgroundWriter,
        watchdog: Watchdog,
        keeps_beginning: bool,
        when_saved: Callable[[Path], None],
    ):
        """`keeps_beginning`: whether the run may have to go back to it. `when_saved` is told each one."""
        self._trainer, self._state, self._writer, self._watchdog = trainer, state, writer, watchdog
        self._keeps_beginning, self._when_saved = keeps_beginning, when_saved
        self._owns_run = False  # true in `owned`: in `fit`, and while something outside it writes there
        self._continues_run = False
        """The Trainer's state is this run's: loaded from it, or its beginning."""
        self._beginning: Snapshot | None = None  # until there is a checkpoint
        self.saved_at: int | None = None
        """The step saved last, complete or still being written; None: the last one could not be."""
        self.has_loaded = False
        """Whether the Trainer's state comes from a checkpoint."""

    @property
    def _store(self) -> CheckpointStore | None:
        return self._trainer.store

    # -- saving

    def begin(self) -> None:
        """Copy everything to the host, and have it written while training goes on."""
        assert self._store is not None
        self.end()
        for logger in self._trainer.loggers:
            logger.sync()  # a step that the checkpoint counts must not be missing from the log
        with self._watchdog.phase(SAVING):
            self._writer.start(self._store, self._state.snapshot())
        self.saved_at, self._trainer.saved_seconds = self._trainer.step, self._trainer.seconds

    def end(self, is_last_try: bool = False) -> Written | None:
        """Wait for the write in flight, if there is one; `is_last_try`: the caller says what fails."""
        if not self._writer.is_busy:
            return None
        with self._watchdog.phase(SAVING):
            written = self._writer.finish(self._watchdog.go_on, is_last_try)
        if written.error is None:
            self._beginning = None
            self._when_saved(written.path)
        else:
            self.saved_at = None  # tried again at the next occasion, and at the latest at the end
        return written

    def forget_step(self, step: int) -> None:
        """The checkpoint of this step, if there is one, lacks something by now: it is to be saved anew."""
        if self.saved_at == step:
            self.saved_at = None

    def save(self) -> Path:
        """Begin and end. Raises RunFailedError where the checkpoint cannot be written, and UserError where
        the run directory is another's.
        """
        with ExitStack() as stack:
            if not self._owns_run:
                stack.enter_context(self.owned())
                self.go_on_here()
            self.begin()
            written = self.end(is_last_try=True)
        assert written is not None
        if written.error is not None:
            assert self._store is not None
            lost, again = "what came after the checkpoint before", "it goes on from there"
            if not self._store.steps():
                lost, again = "there is no checkpoint before, so all", "it begins anew"
            raise RunFailedError(
                f"{written.path} cannot be saved ({written.error}): {lost} is lost; make room or mend the "
                f"disk, and run again: {again}"
            )
        return written.path

    @property
    def can_rescue(self) -> bool:
        """Whether a thread can save the state: ranks would have to gather it together."""
        return self._store is not None and self._trainer.world.size == 1

    def rescue(self) -> Callable[[int], NoReturn] | None:
        """Copy the state as it is now; returns what saves it, from a thread. None: nothing can."""
        if self._store is None or not self.can_rescue:
            return None
        snapshot = None if self.saved_at == self._trainer.step else self._state.snapshot()
        if self._trainer.step == 0 and self._keeps_beginning and self.saved_at != 0:
            self._beginning = snapshot
        return self._writer.leaving_with(self._store, snapshot)

    # -- going on

    def resume(self, path: Path | None, is_checked: bool = False) -> bool:
        """Load the checkpoint at `path`, or the newest whole one; False where there is none."""
        if path is None:
            newest = None if self._store is None else self._newest(self._store)
            if newest is None:
                return False
            path = newest
        elif not is_checked and (reason := damage(path)) is not None:
            raise UserError(f"{path} cannot be used: {reason}")
        self._load(path)
        return True

    def go_back(self) -> bool:
        """To the newest checkpoint, or to the run's beginning; False where neither is possible."""
        self.end()
        if self._store is None or self._trainer.run_dir is None:
            return False
        try:
            if self._trainer.world.first(self._store.has_any):
                return self.resume(None)
            if self._beginning is None or self._trainer.step > _FARTHEST:
                return False
            with self._beginning.written_in(self._trainer.run_dir) as directory:
                self._load(directory, "the run's beginning")
        except (OSError, SafetensorError) as error:
            say(f"the run cannot go back to its beginning: {in_words(error)}")
            return False
        return True

    def _load(self, path: Path, name: str | None = None) -> None:
        self._state.load(path, name)
        is_own = self._store is not None and self._store.holds(path)
        self.saved_at = self._trainer.step if is_own else None
        self.has_loaded = self._continues_run = True

    def _newest(self, store: CheckpointStore) -> Path | None:
        return self._with_mirror(store, lambda: self._newest_here(store))

    def _with_mirror(self, store: CheckpointStore, function: Callable[[], T]) -> T:
        """`function` on the first rank; the watchdog hears what it copies to or from the mirror."""
        told = nullcontext() if store.mirror is None else store.mirror.telling(self._watchdog.go_on)
        with told:
            return self._trainer.world.first(function)

    def _newest_here(self, store: CheckpointStore) -> Path | None:
        run_dir = self._trainer.run_dir
        is_anothers = not self._owns_run and run_dir is not None and is_locked(run_dir)
        if is_anothers or not (self._owns_run or store.needs_lock()):
            return CheckpointStore(store.directory).newest()  # nothing is changed there
        with nullcontext() if self._owns_run else RunLock(run_dir):
            store.take_over()
            return store.newest(self._refuse)

    def _refuse(self, path: Path, reason: str, used: Path) -> None:
        assert self._store is not None
        aside = self._store.set_aside(path)
        say(f"checkpoint {path} refused: {reason}; it is {aside.name} now, and {used.name} is used")

    # -- the run directory

    @contextmanager
    def owned(self) -> Iterator[None]:
        """In here the run directory is this Trainer's alone. Raises UserError where it is another's."""
        trainer = self._trainer
        with ExitStack() as stack:
            trainer.world.first(lambda: _lock(trainer.run_dir, stack))
            if trainer.run_dir is not None:
                trainer.world.check_shared(trainer.run_dir)
            self._owns_run = True
            try:
                yield
            finally:
                self._owns_run = False

    def begin_run(self) -> bool:
        """At the start of `fit`: load the newest checkpoint, or have the run go on from what was loaded. It
        is copied to the mirror, if that was missed.

        False where there is none, and it begins. Raises UserError where it must not go on.
        """
        if self._store is not None:
            contents.check_dtypes(self._trainer.model)  # before the first step, not at the first save
        goes_on, store, step = self._goes_on(), self._store, self.saved_at
        if store is not None and step is not None:
            self._with_mirror(store, lambda: store.copy_missed(step))
        return goes_on

    def _goes_on(self) -> bool:
        trainer = self._trainer
        if self.has_loaded:
            if self._store is not None:
                self.go_on_here()
                # Loaded from elsewhere: a process after this one would go on from what is here.
                trainer.control.save |= self.saved_at != trainer.step and self._store.has_any()
            return True
        if self._store is not None:
            trainer.world.first(self._store.take_over)
        if trainer.cfg.checkpoint.resume == "never" and self._store is not None and self._store.has_any():
            raise UserError(
                f"{trainer.run_dir} holds checkpoints and checkpoint.resume=never: choose another run_dir, "
                "or checkpoint.resume=auto to go on"
            )
        is_resumed = self.resume(None)
        self._continues_run = True
        return is_resumed

    def go_on_here(self) -> None:
        """Have the run directory go on from the Trainer's state: what was saved after it is set aside."""
        self._trainer.world.first(self._claim)
        self._continues_run = True

    def _claim(self) -> None:
        store = self._store
        assert store is not None
        store.take_over()
        if not self._continues_run and store.has_any():
            raise UserError(
                f"save: {self._trainer.run_dir} holds checkpoints, and this Trainer has loaded none of them: "
                "call resume() first, or choose another run_dir"
            )
        store.abandon_later(self._trainer.step)


def _lock(run_dir: Path | None, stack: ExitStack) -> None:
    stack.enter_context(RunLock(run_dir))
