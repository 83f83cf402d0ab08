"""The checkpoints of a run: `checkpoints/step-N/`, each complete and vouched for, or not there."""

import errno
import os
import re
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

from tputrain.announce import announced, say, warn
from tputrain.checkpoint import CHECKPOINTS
from tputrain.checkpoint.integrity import (
    DamagedCheckpointError,
    PartDigests,
    seal,
    sync_directory,
    verify,
)
from tputrain.checkpoint.mirror import ABANDONED, Mirror, warn_not_copied
from tputrain.checkpoint.pace import no_rest
from tputrain.checkpoint.unsealed import WRITTEN, is_written, mark_written
from tputrain.config_checks import Settings, expect, expect_at_least, expect_choice
from tputrain.duration import seconds_of
from tputrain.errors import UserError

_NAME = re.compile(r"step-(\d+)")
_UNFINISHED = ".unfinished-"
_REPLACED = ".replaced-"
_REFUSED = "refused-"
_BYTES_TO_ANNOUNCE = 500_000_000  # a second or several, by the disk

Refused = Callable[[Path, str, Path], None]
"""(path, reason, used): the checkpoint at `path` is damaged, and the one at `used` is taken instead."""


@dataclass(frozen=True)
class CheckpointConfig(Settings):
    """When to save, how many to keep, and whether to go on where a run stopped."""

    every: int | str | None = 100
    """Steps between checkpoints, or a time of training such as 30min; None: only at the end and on a
    signal."""
    keep_last: int = 2
    """How many of the newest to keep."""
    keep_every: int | None = None
    """Checkpoints at multiples of this many steps are kept for ever; None: none is."""
    resume: str = "auto"
    """auto: from the newest whole checkpoint, if any; never: a run directory that holds any is refused."""
    background: bool = True
    """Whether training goes on while a checkpoint is written, once everything is copied to the host."""
    mirror: str | None = None
    """URL, as fsspec takes it (gs://bucket/path), to which each checkpoint is copied, and from which the run
    goes on where its own directory holds none."""

    def __post_init__(self) -> None:
        if isinstance(self.every, str) and self.every.isdecimal():  # of an interpolation
            object.__setattr__(self, "every", int(self.every))
        if isinstance(self.every, str):
            expect(
                self.every_seconds is not None,
                "checkpoint.every",
                self.every,
                "a number of steps such as 100, or a time such as 30min",
            )
            expect(
                self.keep_every is None,
                "checkpoint.keep_every",
                self.keep_every,
                f"null with checkpoint.every={self.every}, which does not save at multiples of a step",
            )
        else:
            expect_at_least("checkpoint.every", self.every, 1)
        expect_at_least("checkpoint.keep_last", self.keep_last, 1)
        expect_at_least("checkpoint.keep_every", self.keep_every, 1)
        expect(
            self.keep_every is None or self.every_steps is None or self.keep_every % self.every_steps == 0,
            "checkpoint.keep_every",
            self.keep_every,
            f"a multiple of checkpoint.every={self.every}, or some of those to keep are never written",
        )
        expect_choice("checkpoint.resume", self.resume, ("auto", "never"))
        expect(
            self.mirror is None or "://" in str(self.mirror),
            "checkpoint.mirror",
            self.mirror,
            "a URL such as gs://bucket/runs/llama or file:///mnt/runs/llama",
        )

    @property
    def every_steps(self) -> int | None:
        """`every`; None: it is a time, or null."""
        return None if isinstance(self.every, str) else self.every

    @property
    def every_seconds(self) -> float | None:
        """`every`, where it is a time; else None."""
        return seconds_of(self.every) if isinstance(self.every, str) else None


class CheckpointStore:
    """Writes, finds and removes the checkpoints in one directory, which need not exist yet."""

    def __init__(self, directory: Path | str, keep_last: int = 2, keep_every: int | None = None):
        self.directory = Path(directory)
        self.keep_last = keep_last
        self.keep_every = keep_every
        self.mirror: Mirror | None = None
        self.also_keeps: Callable[[list[int]], set[int]] = lambda steps: set()
        """Of these steps, those whose checkpoints are not removed either, such as the best."""

    @classmethod
    def of_run(cls, run_dir: Path | str, cfg: CheckpointConfig) -> "CheckpointStore":
        """That of a run. Raises UserError where nothing serves the URL of its mirror."""
        store = cls(Path(run_dir) / CHECKPOINTS, cfg.keep_last, cfg.keep_every)
        store.mirror = None if cfg.mirror is None else Mirror(cfg.mirror)
        return store

    def path(self, step: int) -> Path:
        """Where the checkpoint of `step` is, or would be."""
        return self.directory / f"step-{step}"

    def steps(self) -> list[int]:
        """Steps that have a checkpoint, whole or not, newest first."""
        if not self.directory.is_dir():
            return []
        matches = (_NAME.fullmatch(path.name) for path in self.directory.iterdir())
        return sorted((int(match[1]) for match in matches if match), reverse=True)

    def write(
        self,
        step: int,
        fill: Callable[[Path], None],
        num_bytes: int = 0,
        rest: Callable[[], None] = no_rest,
        written: Callable[[], None] | None = None,
        parts: Callable[[Path], PartDigests] | None = None,
    ) -> Path:
        """Have `fill` write the files of `step` into an empty directory, then put that in place at once.

        `written` is called as soon as a SIGKILL of this process costs nothing any more: `take_over` would
        finish the rest, between whose pieces `rest` is called. `parts` gives the digests of what several
        processes have written; what it does not name is read here.

        Killed at any moment, the directory called `step-N` is the whole new checkpoint or what was there
        before, once `recover` has been called. Raises OSError where the disk fails, or has not `num_bytes`
        free; what was there before stays, and nothing half-written does.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        self.recover()
        self._remove_unfinished()
        self._check_room(num_bytes)
        unfinished = self.unfinished(step)
        unfinished.mkdir()
        try:
            fill(unfinished)
            mark_written(unfinished)
            if written is not None:
                written()
            rest()
            final = self._finish(unfinished, step, rest, {} if parts is None else parts(unfinished))
        except Exception:
            shutil.rmtree(unfinished, ignore_errors=True)  # a disk that is full must not stay so
            with suppress(OSError):
                self.recover()
            raise
        self._abandon_here(step)
        self._remove_old(step)
        return final

    def unfinished(self, step: int) -> Path:
        """Where the files of `step` are while they are written."""
        return self.directory / f"{_UNFINISHED}step-{step}"

    def _finish(
        self, unfinished: Path, step: int, rest: Callable[[], None], parts: PartDigests | None = None
    ) -> Path:
        """Vouch for what is written, and put it in place."""
        seal(unfinished, rest, parts)
        (unfinished / WRITTEN).unlink(missing_ok=True)
        final = self.path(step)
        if final.exists():
            # A directory cannot be renamed over another; killed before the next line, `recover` undoes this.
            os.rename(final, self.directory / f"{_REPLACED}{final.name}")
        os.rename(unfinished, final)
        sync_directory(self.directory)
        self.recover()
        return final

    def take_over(self) -> None:
        """Finish what an earlier process was killed at; for one that trains, and has the run to itself.

        Nothing is removed: which are kept, such as the best, may not be known yet. Raises UserError where the
        disk does not take it.
        """
        self.recover()
        for unfinished in self.directory.glob(f"{_UNFINISHED}step-*"):
            step = int(unfinished.name.rpartition("-")[2])
            if not (is_written(unfinished) or damage(unfinished) is None):
                continue  # the next `write` removes it
            try:
                finished = self._finish(unfinished, step, no_rest)
            except OSError as error:
                raise UserError(
                    f"{unfinished}: the checkpoint that the process before was writing cannot be finished "
                    f"({error.strerror}); make room or mend the disk, and run again"
                ) from None
            say(f"finished {finished}, which the process before was killed at")

    def recover(self) -> None:
        """Put back what a `write` that was killed had moved out of its way; for the process that trains.

        One that only reads must not: the writer may be between its two renames.
        """
        for replaced in self.directory.glob(f"{_REPLACED}*"):
            final = self.directory / replaced.name.removeprefix(_REPLACED)
            if final.exists():
                self._remove(replaced)
            else:
                os.rename(replaced, final)

    def abandon_later(self, step: int) -> None:
        """Set aside what was saved after `step`: the run goes on from there, and was on another branch then.

        Renamed to `abandoned-step-N-1`, those are not gone on from, counted or removed any more; the mirror's
        alike. Killed in between, the other branch still is the one that goes on: its last is renamed last,
        and the mirror's before those that are here. Raises UserError where that cannot be done.
        """
        if self.mirror is not None:
            self.mirror.abandon_later(step)
        try:
            self._abandon_here(step)
        except OSError as error:
            raise UserError(
                f"{self.directory}: what was saved after step {step} cannot be set aside ({error.strerror}); "
                "mend that, and run again"
            ) from None

    def _abandon_here(self, step: int) -> None:
        later = [each for each in reversed(self.steps()) if each > step]
        if not later:
            return
        names = [self.set_aside(self.path(each), ABANDONED).name for each in later]
        sync_directory(self.directory)
        say(
            f"the run goes on from step {step}: what was saved after it is set aside in {self.directory} as "
            f"{', '.join(names)}; remove that when nobody needs it"
        )

    def newest(self, refused: Refused | None = None, only: tuple[str, ...] = ()) -> Path | None:
        """The newest whole checkpoint, None where there never was one; `only`: vouched for in these files.

        What a mirror has that is newer is fetched first, and what is damaged here in its place.
        `refused(path, reason, used)` hears of every newer one that is not whole, and which is used instead.
        None: a line says so, but with `only` nothing does: who reads all of it will say it.
        Raises UserError where there are checkpoints, or some that were set aside, and none is whole: what
        was learned must not be lost by beginning anew unasked.
        """
        damaged: list[tuple[Path, str]] = []
        refused = refused or (say_nothing if only else say_refused)
        if self.mirror is not None:
            newest_here = max(self.steps(), default=-1)
            self.mirror.fetch(self.directory.parent, lambda step: step > newest_here)
        for step in self.steps():
            reason = damage(self.path(step), only)
            if reason is None or self._is_fetched_anew(step, reason):
                return self._used(step, damaged, refused)
            if not self.path(step).exists():
                return self.newest(refused, only)  # who trains here removed it, and has saved a newer one
            damaged.append((self.path(step), reason))
        if self.mirror is not None:
            here = self.steps()
            fetched = self.mirror.fetch(self.directory.parent, lambda step: step not in here)
            if fetched is not None:
                return self._used(fetched, damaged, refused)
        if not self.has_any():
            return None
        found = "; ".join(f"{path.name}: {why}" for path, why in damaged) or "all were set aside before"
        where, also = str(self.directory.parent), ""
        if self.mirror is not None:
            where, also = f"{where} and {self.mirror.url}", " and checkpoint.mirror"
        raise UserError(
            f"{self.directory}: no whole checkpoint to go on from ({found}): restore one, or begin anew with "
            f"another run_dir{also} or by removing {where}"
        )

    def _used(self, step: int, damaged: list[tuple[Path, str]], refused: Refused) -> Path:
        for path, why in damaged:
            refused(path, why, self.path(step))
        return self.path(step)

    def _is_fetched_anew(self, step: int, reason: str) -> bool:
        """Whether the checkpoint of `step`, which is damaged, was replaced by a whole one from the mirror."""
        if self.mirror is None or step not in self.mirror.steps():
            return False
        if not self.mirror.fetch_step(step, self.directory.parent, self.set_aside):
            return False
        say(f"checkpoint {self.path(step)} was damaged ({reason}): taken from {self.mirror.url}")
        return True

    def copy_missed(self, step: int) -> None:
        """Copy the checkpoint of `step` to the mirror, if an earlier process was killed at that or failed.

        A copy that fails is one loud line. Nothing is removed: which are kept, such as the best, may not be
        known yet.
        """
        if self.mirror is not None and (why := self.mirror.push_missed(self.path(step))) is not None:
            warn_not_copied(self.path(step), why)

    def needs_lock(self) -> bool:
        """Whether `take_over` or `newest` would change this directory; then lock the run first."""
        left = (f"{_UNFINISHED}step-*", f"{_REPLACED}*")
        return self.mirror is not None or any(any(self.directory.glob(pattern)) for pattern in left)

    def has_any(self) -> bool:
        """Whether a checkpoint was ever finished here or in the mirror, whole or not, set aside or not."""
        return self._has_any_here() or (self.mirror is not None and self.mirror.has_any())

    def _has_any_here(self) -> bool:
        aside = (f"{_REFUSED}*", f"{ABANDONED}*")
        return bool(self.steps()) or any(any(self.directory.glob(pattern)) for pattern in aside)

    def all_steps(self) -> set[int]:
        """Steps that have a checkpoint here or in the mirror."""
        return {*self.steps(), *(self.mirror.steps() if self.mirror is not None else ())}

    def holds(self, path: Path) -> bool:
        """Whether `path` is one of this run's checkpoints, and not one that was set aside."""
        path = path.resolve()
        return path.parent == self.directory.resolve() and _NAME.fullmatch(path.name) is not None

    def set_aside(self, path: Path, prefix: str = _REFUSED) -> Path:
        """Rename a checkpoint, such as a damaged one, so that it neither counts nor stands in the way."""
        number = 1
        while (aside := path.with_name(f"{prefix}{path.name}-{number}")).exists():
            number += 1
        return path.rename(aside)

    def _check_room(self, num_bytes: int) -> None:
        free = shutil.disk_usage(self.directory).free
        if free < num_bytes:
            needs = f"{num_bytes / 1e6:,.1f} MB needed, {free / 1e6:,.1f} MB free"
            if (old := len(self.steps())) > 1:
                needs += f"; the {old} that are there stay: a smaller checkpoint.keep_last leaves room for it"
            raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} ({needs})", str(self.directory))

    def _remove_unfinished(self) -> None:
        for path in self.directory.glob(f"{_UNFINISHED}*"):
            shutil.rmtree(path, ignore_errors=True)  # what stays in the way of a new one is told by that

    def keeps(self, steps: list[int]) -> set[int]:
        """Which of these steps (newest first) are kept: the last, multiples of `keep_every`, `also_keeps`."""
        every = {step for step in steps if self.keep_every is not None and step % self.keep_every == 0}
        return set(steps[: self.keep_last]) | every | self.also_keeps(steps)

    def _remove_old(self, written: int) -> None:
        steps = self.steps()
        for step in set(steps) - self.keeps(steps) - {written}:
            self._remove(self.path(step))

    def _remove(self, path: Path) -> None:
        # Renamed first: killed half-way, a removal must not leave something that looks like a checkpoint.
        doomed = self.directory / f"{_UNFINISHED}old-{path.name}"
        try:
            os.rename(path, doomed)
            shutil.rmtree(doomed)
        except OSError as error:  # what is saved is not less so for it
            warn(f"{path} cannot be removed ({error.strerror}); it takes room until it can")


def say_refused(path: Path, reason: str, used: Path) -> None:
    """For `CheckpointStore.newest`, where nothing is to be done about a damaged one: a line."""
    say(f"checkpoint {path} refused: {reason}; {used.name} is used")


def say_nothing(path: Path, reason: str, used: Path) -> None:
    """For `CheckpointStore.newest`, where who reads all of it will say it."""


def damage(path: Path, only: tuple[str, ...] = ()) -> str | None:
    """What is wrong with the checkpoint at `path`, in one line; None where it is whole."""
    try:
        with _announced_if_long(path, only):
            verify(path, only)
    except DamagedCheckpointError as error:
        return str(error)
    return None


def _announced_if_long(path: Path, only: tuple[str, ...]) -> AbstractContextManager[object]:
    num_bytes = 0 if only else sum(file.stat().st_size for file in path.glob("*"))
    if num_bytes < _BYTES_TO_ANNOUNCE:
        return nullcontext()
    return announced(f"checking {path} ({num_bytes / 1e9:.1f} GB)")
