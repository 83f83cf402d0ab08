"""One process at a time in a run directory: two would overwrite each other's checkpoints."""

import fcntl
import os
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO

from tputrain.announce import say
from tputrain.errors import UserError


class RunLock:
    """Context that holds `run_dir/.lock`; the system lets go of it when the process dies, however it dies."""

    def __init__(self, run_dir: Path | None):
        self.run_dir = run_dir
        self._file: IO[str] | None = None

    def __enter__(self) -> "RunLock":
        if self.run_dir is None:
            return self
        if self.run_dir.is_file():
            raise UserError(f"run_dir={self.run_dir} is a file: expected a directory, or a name that is free")
        was_held = is_locked(self.run_dir)  # before this process has the file open, too
        try:
            self.run_dir.mkdir(parents=True, exist_ok=True)
            self._file = (self.run_dir / ".lock").open("a+", encoding="utf-8")
        except OSError as error:
            raise self._unwritable(error) from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise self._taken() from None
        except OSError as error:  # a network file system that was mounted without locks
            if was_held:
                raise self._taken() from None
            say(
                f"note: the file system of {self.run_dir} has no locks ({error.strerror}): a second process "
                "here is noticed on this machine only; never start one on another machine"
            )
        try:
            self._file.truncate(0)
            self._file.write(f"{os.getpid()}\n")
            self._file.flush()
        except OSError as error:
            raise self._unwritable(error) from None
        return self

    def _taken(self) -> UserError:
        assert self._file is not None
        self._file.seek(0)
        holder = self._file.read().strip() or "unknown"
        self._file.close()
        return UserError(
            f"{self.run_dir}: another process (pid {holder}) is training here; "
            "wait for it, or choose another run_dir"
        )

    def _unwritable(self, error: OSError) -> UserError:
        return UserError(
            f"run_dir={self.run_dir}: cannot write there ({error.strerror}); mend that or take another"
        )

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._file is not None:
            # Said, and not left to the closing: a data worker, forked meanwhile, holds the file open as well.
            with suppress(OSError):  # where the file system has no locks, or the disk is full
                self._file.truncate(0)
                fcntl.flock(self._file, fcntl.LOCK_UN)
            self._file.close()


def is_locked(run_dir: Path) -> bool:
    """Whether a process of this user, on this machine, has the run directory in use. Only looks: a lock taken
    to find out would refuse a process that starts at this moment.
    """
    lock = (run_dir / ".lock").resolve()
    try:
        holder = int(lock.read_text(encoding="ascii"))
        opened = list(Path(f"/proc/{holder}/fd").iterdir())
    except (OSError, ValueError):
        return False  # nobody was ever here, or that process is gone
    return any(_target(descriptor) == lock for descriptor in opened)


def _target(descriptor: Path) -> Path | None:
    try:
        return descriptor.readlink()
    except OSError:
        return None  # closed in the meantime
