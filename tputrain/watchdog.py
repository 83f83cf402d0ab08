"""The watchdog: a thread that knows what the run is doing and how long that takes, and ends a run that hangs.

The training thread only says which phase it enters, which costs it about a microsecond; it never waits for
the watchdog, and the watchdog never asks the device anything while all is well.
"""

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import torch

from tputrain import device as devices
from tputrain.announce import warn
from tputrain.config_checks import Settings, expect_above
from tputrain.errors import RunFailedError
from tputrain.hang_report import report_hang
from tputrain.heartbeat import ENDED, FAILED, write_heartbeat
from tputrain.loggers.logger import Record
from tputrain.parallel.launched import record_error, speaks
from tputrain.signals import Interrupted

SETTING_UP = "setting up"
FIRST_STEP = "first step"
DATA = "waiting for data"
STEP = "step"
READING = "reading values"
EVALUATING = "evaluating"
SAVING = "saving"

HANG_EXIT_CODE = 1
_SILENCE = 10.0  # seconds after which is said what goes on
_BEATS = 3  # so many that do not come make a rank silent
_OTHERS_WRITE = 3.0  # seconds in which the other ranks write their reports, too
_OTHERS_LEAVE = 15.0  # seconds after that in which they end in their own way
_DEBUGGERS = ("pdb", "bdb", "pydevd", "debugpy")


@dataclass(frozen=True)
class WatchdogConfig(Settings):
    """How long a phase of a run may take before the run counts as hanging, and is ended."""

    enabled: bool = True
    """Whether a run that hangs is ended; its heartbeat is written all the same."""
    step_seconds: float = 60.0
    """Of steps and of reading their values: seconds beyond twice what the steps so far lead to expect."""
    wait_seconds: float = 600.0
    """Of waits for data, evaluations, saves and callbacks: seconds beyond twice the longest so far. Also of
    silence of a rank that all others wait for, whatever it does.
    """
    setup_seconds: float = 3600.0
    """Seconds for anything that is done for the first time, or that compiles."""
    heartbeat_seconds: float = 5.0
    """Longest time between two writings of run_dir/heartbeat.json."""

    def __post_init__(self) -> None:
        for key in ("step_seconds", "wait_seconds", "setup_seconds", "heartbeat_seconds"):
            expect_above(f"watchdog.{key}", getattr(self, key), 0.0)


class _Phase(NamedTuple):
    name: str
    since: float  # on the watchdog's clock


class Watchdog:
    """Context in which the process is watched; `phase` says what it does, `learn` how long steps take.

    A phase that outlives its limit ends the process with HANG_EXIT_CODE after every thread's stack was
    written (`tputrain.hang_report`). Time in which the whole process stood still (stopped, suspended) does
    not count, nor does time in a debugger.

    Where the hanging thread holds Python's global lock, no Python thread runs, this one included. For that
    case the interpreter's own C timer is kept wound up (`faulthandler.dump_traceback_later`): it writes the
    stacks to standard error and ends the process `wait_seconds` later than the limit.

    Each of several ranks has one. A rank that waits for another one, which is alive, leaves that one to its
    own watchdog. A rank that says nothing for `wait_seconds` no longer runs, and the others end the run.
    When a run hangs, all ranks write their reports, and one line says whom all wait for.
    """

    def __init__(
        self,
        cfg: WatchdogConfig,
        run_dir: Path | None,
        device: torch.device,
        step: Callable[[], int],
        rank: int | None = None,
    ):
        """`step()` is asked for the number of optimizer steps done. `rank`: None in a run of one process."""
        self.cfg, self.run_dir, self.device, self.step, self.rank = cfg, run_dir, device, step, rank
        self._phase = _Phase(SETTING_UP, 0.0)
        self._clock = 0.0  # seconds in which this process ran, counted by the thread
        self._tick = min(1.0, cfg.step_seconds / 4, cfg.heartbeat_seconds)
        self._longest: dict[str, float] = {}  # seconds, by the name of a phase
        self._step_seconds: float | None = None
        self._read_up_to = 0  # the step whose values were read last
        self._beat_in, self._beat_at = SETTING_UP, 0.0
        self._told: _Phase | None = None
        self._silent_since: float | None = None  # when a rank that all wait for was found to be silent
        self._leaves_at: float | None = None  # after another rank has found that the run hangs
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    # -- what the training thread says -----------------------------------------------------------------------

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """In here the run does `name`; the phase around it starts anew afterwards."""
        outer, began = self._phase.name, self._clock
        self._phase = _Phase(name, began)
        try:
            yield
        finally:
            self._longest[name] = max(self._longest.get(name, 0.0), self._clock - began)
            self._phase = _Phase(outer, self._clock)

    def go_on(self) -> None:
        """The phase is alive: its time starts anew."""
        self._phase = _Phase(self._phase.name, self._clock)

    def learn(self, records: Sequence[Record], is_first_step: bool = False) -> None:
        """Take the step time from records that were just read; a first step, or one that compiled, teaches
        nothing.
        """
        self._read_up_to = records[-1]["step"]
        if not is_first_step and not any(record["compilations"] for record in records):
            self._step_seconds = max(self._step_seconds or 0.0, records[-1]["step_seconds"])

    def went_back(self) -> None:
        """The run is back at an earlier step; none of those after it is under way."""
        self._read_up_to = self.step()

    # -- the thread ------------------------------------------------------------------------------------------

    def __enter__(self) -> "Watchdog":
        self._ended.clear()
        self._phase, self._read_up_to = _Phase(SETTING_UP, self._clock), self.step()
        self._beat()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._phase = _Phase(ENDED if kind is None or issubclass(kind, Interrupted) else FAILED, self._clock)
        self._beat()

    def _watch(self) -> None:
        looked_at = time.monotonic()
        while not self._ended.wait(self._tick):
            now = time.monotonic()
            # No more than a few ticks at once: the rest of a long pause is time in which nothing could run.
            self.look(min(now - looked_at, 3 * self._tick))
            looked_at = now
        if self.cfg.enabled:
            faulthandler.cancel_dump_traceback_later()

    def look(self, seconds: float) -> None:
        """`seconds` have passed since the last look: write the heartbeat if due, end a run that hangs."""
        self._clock += seconds
        phase = self._phase
        if phase.name != self._beat_in or self._clock - self._beat_at >= self.cfg.heartbeat_seconds:
            self._beat()
        if not self.rank:  # one speaks for all
            self._tell_of_silence(phase)
        if not self.cfg.enabled:
            return
        if self._others is not None and self._others.hangs:
            self._end_with_the_others(phase.name)
            return
        taken, limit = self._clock - phase.since, self.limit(phase.name)
        if taken > limit and devices.is_compiling(self.device):
            limit = max(limit, self.cfg.setup_seconds)
        if taken > limit and not (_is_debugged() or self._waits_for_the_living()):
            found = f"{taken:.1f} s, expected at most {limit:.1f} s (watchdog.* sets that)"
            self._end_the_process(phase.name, found)
        elif found := self._silent_for_too_long(taken):
            self._end_the_process(phase.name, found)
        spare = max(limit - taken, 0.0) + self.cfg.wait_seconds
        faulthandler.dump_traceback_later(spare, exit=True, file=2)

    def _tell_of_silence(self, phase: _Phase) -> None:
        """Once, of a wait or a step that is longer than any before; other phases are announced."""
        taken = self._clock - phase.since
        expected = max(_SILENCE, 2 * self._longest.get(phase.name, 0.0))
        told = (DATA, STEP) if self.rank is None else (DATA, STEP, READING)
        if phase.name in told and taken >= expected and phase is not self._told:
            self._told = phase
            what = "compiling" if devices.is_compiling(self.device) else phase.name
            warn(f"step {self.step() + 1}: {what}, {taken:.0f} s so far{self._awaited()}")

    def _awaited(self) -> str:
        """Whom all ranks wait for, to be added to a line."""
        if (world := self._others) is None:
            return ""
        if (awaited := world.awaited(self._silence)) is None:
            return "; the process that carries word between the ranks does not answer"
        if not awaited:
            return "; no rank waits for another one"
        return f"; everybody waits for {'; and for '.join(map(self._described, awaited))}"

    def _described(self, awaited: Any) -> str:
        silent = f"last heard of {awaited.silent:.0f} s ago"
        parts = [awaited.name, silent if awaited.silent > self._silence else "alive"]
        if awaited.beat:
            parts.append(f"in phase {awaited.beat!r}")
        if awaited.call:
            parts.append(f"last in {awaited.call}")
        return ", ".join(parts)

    @property
    def _others(self) -> Any:
        """What is known of the other ranks (`Peers` of the device); None: there are none."""
        return None if self.rank is None else devices.peers()

    @property
    def _silence(self) -> float:
        """Seconds after which a rank that says nothing is no longer taken to be alive."""
        return _BEATS * (self.cfg.heartbeat_seconds + self._tick)

    def _waits_for_the_living(self) -> bool:
        """Whether all that this rank waits for is other ranks that are alive: their watchdogs watch them."""
        if (world := self._others) is None:
            return False
        awaited = world.awaited(self._silence)
        return bool(awaited) and all(
            each.rank != self.rank and each.silent <= self._silence for each in awaited
        )

    def _silent_for_too_long(self, taken: float) -> str:
        """What is said of a rank that all wait for and that has said nothing for `wait_seconds`; "": there is
        none. Its watchdog would speak while it compiles, or does something for the first time.
        """
        longest = max(self.cfg.wait_seconds, self._silence)
        awaited = self._others.awaited(longest) if taken > longest and self._others is not None else None
        silent = [
            each.silent
            for each in awaited or ()
            if each.rank != self.rank and each.silent > longest and each.beat not in (ENDED, FAILED)
        ]
        if not silent:
            self._silent_since = None
            return ""
        if self._silent_since is None:
            self._silent_since = self._clock
        # Where all ranks were suspended together, each has to have had time to say something.
        if self._clock - self._silent_since <= self._silence:
            return ""
        return (
            f"a rank says nothing for {max(silent):.0f} s, expected at most {longest:.0f} s "
            "(watchdog.wait_seconds)"
        )

    def _end_with_the_others(self, name: str) -> None:
        """Another rank has found that the run hangs: the stacks of this one, and its end at last."""
        if self._leaves_at is None:
            self._leaves_at = self._clock + _OTHERS_WRITE + _OTHERS_LEAVE
            reason = f"another rank hangs; this one is at step {self.step()} in phase {name!r}"
            report_hang(self.run_dir, self.device, reason, self.rank)
        elif self._clock > self._leaves_at:
            os._exit(HANG_EXIT_CODE)

    def _end_the_process(self, name: str, found: str) -> None:
        reason = (
            f"hangs at step {self.step()} in phase {name!r}: {found}{self._awaited()}; it is ended: "
            "run again, it goes on from the newest checkpoint, if there is one"
        )
        world = self._others
        if world is not None and not world.declare_hang():
            return  # another rank was faster
        try:
            told = report_hang(self.run_dir, self.device, reason, self.rank)
            if world is not None:
                time.sleep(_OTHERS_WRITE)
                record_error(RunFailedError(told))
            if speaks(told):
                warn(f"tputrain: {told}")
        finally:
            # Not sys.exit: the training thread would have to agree.
            os._exit(HANG_EXIT_CODE)

    def limit(self, name: str) -> float:
        """Seconds that phase `name` may take by now."""
        if name in (STEP, READING):
            if self._step_seconds is None:
                return self.cfg.setup_seconds
            # Dispatch is asynchronous: whoever waits now waits for all steps since the last read.
            in_flight = max(self.step() - self._read_up_to, 0) + 1  # asked while the run goes back
            return 2 * in_flight * self._step_seconds + self.cfg.step_seconds
        # The first step of a form, however short what else ran as one: to weigh labels is, too.
        longest = None if name == FIRST_STEP else self._longest.get(name)
        return self.cfg.setup_seconds if longest is None else 2 * longest + self.cfg.wait_seconds

    def _beat(self) -> None:
        self._beat_in, self._beat_at = self._phase.name, self._clock
        if (world := self._others) is not None:
            world.beat(self._phase.name)
        if self.run_dir is not None:
            seconds = self._clock - self._phase.since
            with suppress(OSError):  # a full disk is no reason to end a run
                write_heartbeat(self.run_dir, self.step(), self._phase.name, seconds, self.rank or 0)


def _is_debugged() -> bool:
    """Whether some thread sits at a debugger's prompt."""
    for frame in sys._current_frames().values():
        looked_at = frame
        while looked_at is not None:
            if looked_at.f_globals.get("__name__", "").partition(".")[0] in _DEBUGGERS:
                return True
            looked_at = looked_at.f_back  # type: ignore[assignment]
    return False
