"""A copy of a run on other storage, for machines whose own disks go with them."""

import errno
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tputrain.announce import announced, say, warn
from tputrain.checkpoint import CHECKPOINTS
from tputrain.checkpoint.integrity import COMPLETE, DamagedCheckpointError, verify
from tputrain.checkpoint.pace import no_rest
from tputrain.errors import UserError

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem, Callback

_FULL = (errno.ENOSPC, errno.EDQUOT)  # which nobody gets for reading
_REPLACED = ".replaced-"  # a checkpoint whose step was saved anew, until that one is copied
_NAME = re.compile(rf"(?:{re.escape(_REPLACED)})?step-(\d+)")
ABANDONED = "abandoned-"
"""Before the name of a checkpoint of a branch that the run has left, here and there."""
_LOGS = ("*.jsonl", "wandb-run.json")


class Mirror:
    """What is behind a URL that fsspec understands: `gs://bucket/runs/llama`, `s3://...`, `file:///mnt/...`.

    It holds `checkpoints/step-N/` as a run directory does, and the run's logs. A checkpoint's mark of
    completeness is copied last, so that one whose copying was cut short does not count. While a step is
    copied a second time, its first copy is `.replaced-step-N`, and counts until the second one is whole.
    """

    def __init__(self, url: str):
        self.url = url.rstrip("/")
        self.filesystem, self.root = _filesystem_of(self.url)
        self.num_moved = 0
        """Pieces copied so far, of whatever size: while this grows, a copy is alive."""
        self._tell = no_rest

    @contextmanager
    def telling(self, is_alive: Callable[[], None]) -> Iterator[None]:
        """In here each piece that is copied calls `is_alive()`: for whoever waits for copies meanwhile."""
        self._tell = is_alive
        try:
            yield
        finally:
            self._tell = no_rest

    def steps(self) -> list[int]:
        """Steps whose checkpoint was copied to its end, newest first. Raises UserError where none answers."""
        marks = self._marks("step-*") + self._marks(f"{_REPLACED}step-*")
        # Copies made by hand have other names.
        matches = (_NAME.fullmatch(mark.split("/")[-2]) for mark in marks)
        return sorted({int(match[1]) for match in matches if match}, reverse=True)

    def has_any(self) -> bool:
        """Whether a checkpoint was ever copied to its end, set aside or not. Raises as `steps` does."""
        return bool(self.steps() or self._marks(f"{ABANDONED}*"))

    def _marks(self, names: str) -> list[str]:
        with self._reading():
            return self.filesystem.glob(f"{self.root}/{CHECKPOINTS}/{names}/{COMPLETE}")

    def _copies(self, step: int) -> list[str]:
        """The whole copies of this step, the newer one first."""
        places = [f"{self.root}/{CHECKPOINTS}/{prefix}step-{step}" for prefix in ("", _REPLACED)]
        return [place for place in places if self.filesystem.exists(f"{place}/{COMPLETE}")]

    def push(self, checkpoint: Path, keeps: Callable[[list[int]], set[int]]) -> str | None:
        """Copy `run_dir/checkpoints/step-N` and the run's logs there, and then remove older checkpoints
        that are not in `keeps(steps)`. Returns what went wrong, in one line; None: nothing.
        """
        try:
            self._push(checkpoint, keeps)
        except Exception as error:  # every file system has exceptions of its own
            return _in_one_line(error)
        return None

    def push_missed(self, checkpoint: Path) -> str | None:
        """As `push`, where what is there is no copy of this very checkpoint. Nothing is removed."""
        try:
            if not self._has(checkpoint):
                with announced(f"copying checkpoint {checkpoint.name} to {self.url}"):
                    self._push(checkpoint, keeps=set)
        except Exception as error:  # as above
            return _in_one_line(error)
        return None

    def _has(self, checkpoint: Path) -> bool:
        mark = f"{self.root}/{CHECKPOINTS}/{checkpoint.name}/{COMPLETE}"
        # A step may have been saved anew; the mark is a digest of all that its checkpoint holds.
        is_there = self.filesystem.exists(mark)
        return is_there and self.filesystem.cat_file(mark) == (checkpoint / COMPLETE).read_bytes()

    def _push(self, checkpoint: Path, keeps: Callable[[list[int]], set[int]]) -> None:
        there = f"{self.root}/{CHECKPOINTS}/{checkpoint.name}"
        self.filesystem.makedirs(f"{self.root}/{CHECKPOINTS}", exist_ok=True)
        for log in _logs_of(checkpoint.parents[1]):
            self._put(log, f"{self.root}/{log.name}")
        replaced = f"{self.root}/{CHECKPOINTS}/{_REPLACED}{checkpoint.name}"
        if self.filesystem.exists(f"{there}/{COMPLETE}"):
            self._remove(replaced)
            # Not moved: a bucket moves file by file, and killed at that, neither place would be whole.
            self._copy(there, replaced)
            self.filesystem.rm_file(f"{there}/{COMPLETE}")
        self._remove(there)  # also a copy that was cut short
        self.filesystem.makedirs(there, exist_ok=True)
        for file in sorted(checkpoint.iterdir(), key=lambda file: file.name == COMPLETE):
            self._put(file, f"{there}/{file.name}")
        self._remove(replaced)
        steps, pushed = self.steps(), int(checkpoint.name.removeprefix("step-"))
        for step in set(steps) - keeps(steps):
            for copy in self._copies(step) if step < pushed else ():
                self.filesystem.rm(copy, recursive=True)

    def _copy(self, directory: str, other: str) -> None:
        """The mark of completeness last."""
        self.filesystem.makedirs(other, exist_ok=True)
        names = [file.split("/")[-1] for file in self.filesystem.ls(directory, detail=False)]
        for name in sorted(names, key=lambda name: name == COMPLETE):
            self.filesystem.cp_file(f"{directory}/{name}", f"{other}/{name}")
            self._count()

    def _remove(self, directory: str) -> None:
        if self.filesystem.exists(directory):
            self.filesystem.rm(directory, recursive=True)

    def abandon_later(self, step: int) -> None:
        """Move the checkpoints after `step` to `abandoned-step-N-1` and so on, the last one last.

        Raises UserError where the storage does not answer.
        """
        for later in reversed(self.steps()):
            if later > step:
                with announced(f"setting step-{later} in {self.url} aside"), self._reading():
                    for copy in reversed(self._copies(later)):
                        self._set_aside(copy, later)

    def _set_aside(self, copy: str, step: int) -> None:
        number = 1
        while self.filesystem.exists(aside := f"{self.root}/{CHECKPOINTS}/{ABANDONED}step-{step}-{number}"):
            number += 1
        self.filesystem.mv(copy, aside, recursive=True)

    def _put(self, file: Path, there: str) -> None:
        self.filesystem.put_file(str(file), there, callback=self._progress())
        self._count()

    def _get(self, there: str, file: Path) -> None:
        self.filesystem.get_file(there, str(file), callback=self._progress())
        self._count()

    def _progress(self) -> "Callback":
        """What fsspec tells of every piece that it copies."""
        from fsspec import Callback

        return Callback(hooks={"moved": self._count})

    def _count(self, *_: object, **__: object) -> None:
        self.num_moved += 1
        self._tell()

    def fetch(self, run_dir: Path, is_wanted: Callable[[int], bool]) -> int | None:
        """Bring the newest whole checkpoint whose step `is_wanted`, and the logs, into a run directory.

        Returns its step, None where there is none. Raises UserError where the storage cannot be read (nobody
        asked to begin anew) or the run's own disk is full.
        """
        return next(
            (step for step in self.steps() if is_wanted(step) and self.fetch_step(step, run_dir)), None
        )

    def fetch_step(self, step: int, run_dir: Path, set_aside: Callable[[Path], object] | None = None) -> bool:
        """Bring this one, if it is whole there. Where there is one here already, `set_aside(its path)` is
        called before the other takes its place.
        """
        here = run_dir / CHECKPOINTS / f"step-{step}"
        unfinished = here.with_name(f".unfinished-fetched-{here.name}")
        with self._reading():
            copies = self._copies(step)
        if not any(self._is_fetched(copy, unfinished) for copy in copies):
            return False
        with self._reading(into=unfinished):
            for pattern in _LOGS:
                for log in self.filesystem.glob(f"{self.root}/{pattern}"):
                    self._get(log, run_dir / log.split("/")[-1])
        if here.exists() and set_aside is not None:
            set_aside(here)
        unfinished.rename(here)  # last: whoever is killed before fetches again
        return True

    def _is_fetched(self, copy: str, into: Path) -> bool:
        """Whether this copy is whole; then its files are in the directory `into`."""
        name = copy.split("/")[-1]
        shutil.rmtree(into, ignore_errors=True)
        with announced(f"fetching checkpoint {name} from {self.url}"), self._reading(into=into):
            for file in self.filesystem.ls(copy, detail=False):
                self._get(file, into / file.split("/")[-1])
        try:
            verify(into)
        except DamagedCheckpointError as error:
            say(f"checkpoint {self.url}/{CHECKPOINTS}/{name} refused: {error}")
            shutil.rmtree(into)
            return False
        return True

    @contextmanager
    def _reading(self, into: Path | None = None) -> Iterator[None]:
        """`into`: a directory for what is read, which is made, and removed where not all of it comes."""
        try:
            if into is not None:
                _make(into)
            yield
        except Exception as error:
            if into is not None:
                shutil.rmtree(into, ignore_errors=True)
            if isinstance(error, UserError):
                raise
            if into is not None and isinstance(error, OSError) and error.errno in _FULL:
                raise UserError(
                    f"{into.parent}: no room for what is fetched from checkpoint.mirror={self.url} "
                    f"({error.strerror}): make room, or choose another run_dir"
                ) from None
            raise UserError(
                f"checkpoint.mirror={self.url} cannot be read ({_in_one_line(error)}): mend that, or set "
                "checkpoint.mirror=null to go without"
            ) from None


def warn_not_copied(checkpoint: Path, why: str) -> None:
    """The one loud line of a copy that failed."""
    warn(f"tputrain: {checkpoint} NOT COPIED to checkpoint.mirror: {why}")


def _in_one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _make(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{directory.parent}: cannot write there ({error.strerror}); mend that") from None


def _logs_of(run_dir: Path) -> list[Path]:
    return [log for pattern in _LOGS for log in run_dir.glob(pattern)]


def _filesystem_of(url: str) -> "tuple[AbstractFileSystem, str]":
    import fsspec

    try:
        filesystem, root = fsspec.url_to_fs(url)
    except Exception as error:  # nothing serves the protocol, or it asks for credentials
        raise UserError(f"checkpoint.mirror={url}: {' '.join(str(error).split())}") from None
    return filesystem, root.rstrip("/")
