"""Starts the ranks of a run on this machine, starts them again where one failed, and says how they ended."""

import io
import logging
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.multiprocessing import start_processes
from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from tputrain.announce import say, warn
from tputrain.errors import UserError
from tputrain.heartbeat import FAILED, RANKS, read_heartbeat
from tputrain.parallel.cluster import hosts
from tputrain.parallel.config import ParallelConfig
from tputrain.parallel.launched import LAUNCHER, RUN_ID, STOPPED_BY
from tputrain.signals import ECHO, WATCHED

_EARLIER = "start-"
"""Beside what each rank says (`rank-0.out`, `rank-0.err`): the same of earlier starts, the newest last."""
_KEPT = 8
"""Earlier starts of which that is kept."""
_STOPPED = "stopped-by"
_USER_ERROR = "UserError: "
_MISTAKE = 2  # the exit code of a UserError
_STOPS = {128 + number: number for number in WATCHED} | {-number: number for number in WATCHED}
"""By exit code of a rank: the signal that ended it before ranks could agree to stop."""
_LOOK_EVERY = 0.1  # seconds
_SECONDS_TO_GO = 5.0  # after SIGKILL


class Launcher:
    """The ranks of one command.

    `newest_step()` is the step of the checkpoint that a run goes on from, 0: there is none; it is asked while
    no rank lives. `arguments_again` are those of ranks that are started again.

    On each of several hosts there is one. They do not start ranks again: whoever started them does.
    """

    def __init__(
        self,
        cfg: ParallelConfig,
        run_dir: Path,
        arguments: Sequence[str],
        arguments_again: Sequence[str],
        newest_step: Callable[[], int],
    ):
        self._cfg, self._run_dir, self._logs = cfg, run_dir, run_dir / RANKS
        self._hosts = hosts()
        self._restarts = cfg.restarts if self._hosts.size == 1 else 0
        self._first_rank = self._hosts.number * cfg.processes
        self._stopped_by = self._logs / (
            _STOPPED if self._first_rank == 0 else f"{_STOPPED}-{self._first_rank}"
        )
        self._arguments, self._arguments_again = arguments, arguments_again
        self._newest_step = newest_step

    def run(self) -> int:
        """Run the ranks to their end; returns the exit code of the command.

        What the first rank says is shown here, too. A rank that fails has all of them started again from the
        newest checkpoint. After SIGINT or SIGTERM all ranks save, together, and the code is 130 or 143.
        """
        for name in [*logging.root.manager.loggerDict]:
            if name.startswith("torch.distributed."):
                logging.getLogger(name).setLevel(logging.CRITICAL)  # what they say is told here, in one line
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(line_buffering=True)  # what ranks say comes through a pipe, too
        try:
            self._logs.mkdir(parents=True, exist_ok=True)
            self._set_logs_aside()  # of the command before
        except OSError as error:
            directory = f"run_dir={self._run_dir}"
            raise UserError(f"{directory}: cannot write there ({error.strerror}); take another") from None
        where = f" on host {self._hosts.number} of {self._hosts.size}" if self._hosts.size > 1 else ""
        number = self._cfg.processes
        say(f"starting {number} rank{'s' * (number > 1)}{where}; what each says: {self._logs}")
        with _Signals() as signals:
            return self._run(signals)

    def _run(self, signals: "_Signals") -> int:
        arguments, place_before = self._arguments, None
        for number in range(self._restarts + 1):
            failure, first_pid = self._run_ranks(arguments, signals)
            code = 0 if failure is None else failure.exitcode
            if signals.received is not None:
                if failure is not None and code not in _STOPS and not signals.has_insisted:
                    self._tell(failure)
                return 128 + signals.received
            if failure is None:
                stopped_by = int(self._stopped_by.read_text(encoding="ascii"))
                return 128 + stopped_by if stopped_by else 0
            if code in _STOPS:
                return 128 + _STOPS[code]
            if code == _MISTAKE or self._restarts == 0:
                return self._tell(failure)
            if number == self._restarts:
                return self._tell(failure, f"; not started again: parallel.restarts={number}")
            newest = self._newest_step()
            place = newest, self._failed_at(first_pid)
            if place == place_before:
                where = "before its first step" if place[1] is None else f"after step {place[1]}"
                return self._tell(failure, f"; not started again: it failed {where} the last time, too")
            # A rank that was killed says nothing of its step. It may well be another one the next time.
            place_before = None if place[1] == _UNKNOWN else place
            logs = self._set_logs_aside()
            origin = f"the checkpoint of step {newest}" if newest else "the beginning"
            count = f"restart {number + 1} of {self._restarts}"
            self._tell(failure, f"; starting all ranks again from {origin} ({count})", logs)
            arguments = self._arguments_again
        raise AssertionError("the last start returns")

    def _run_ranks(self, arguments: Sequence[str], signals: "_Signals") -> tuple[ProcessFailure | None, int]:
        """Start them and wait until all have ended; the first failure, if any, and the first rank's pid."""
        self._stopped_by.write_text("00", encoding="ascii")
        port = self._hosts.port
        if self._hosts.number == 0:
            # Ranks meet in a store that outlives each of them.
            store = TCPStore("localhost", port, is_master=True, wait_for_workers=False)
            port = store.port
        ranks = range(self._cfg.processes)
        # Signals are ours: PyTorch's handler raises wherever it is, and leaves what it was doing half done.
        os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ""
        context = start_processes(
            name="",
            entrypoint=sys.executable,
            args=dict.fromkeys(ranks, ("-u", "-m", "tputrain", *arguments)),
            envs={rank: self._environment(rank, port) for rank in ranks},
            logs_specs=_RankLogs(self._logs, self._first_rank),
            log_line_prefixes=dict.fromkeys(ranks, ""),
        )
        pids = list(context.pids().values())
        try:
            signals.pass_on_to(pids)
            while (result := context.wait(0)) is None:
                time.sleep(_LOOK_EVERY)
        finally:
            signals.pass_on_to([])
            _end_groups(pids)
        # In the order in which they were seen to fail: those that fail because of it wait for that.
        return next(iter(result.failures.values()), None), pids[0]

    def _environment(self, local_rank: int, port: int) -> dict[str, str]:
        """What torchrun would say to the rank, and what only we do."""
        number, hosts = self._cfg.processes, self._hosts
        return {
            "RANK": str(self._first_rank + local_rank),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": str(number * hosts.size),
            "LOCAL_WORLD_SIZE": str(number),
            "GROUP_RANK": str(hosts.number),
            "GROUP_WORLD_SIZE": str(hosts.size),
            "MASTER_ADDR": hosts.address,
            "MASTER_PORT": str(port),
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_RUN_ID": RUN_ID,
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            LAUNCHER: str(os.getpid()),
            STOPPED_BY: str(self._stopped_by.absolute()),
        }

    def _failed_at(self, first_pid: int) -> int | None:
        """Steps done when a rank failed, as the first one says; None: it was not training yet."""
        beat = read_heartbeat(self._run_dir)
        if beat is None or beat["pid"] != first_pid:
            return None
        return int(beat["step"]) if beat["phase"] == FAILED else _UNKNOWN

    def _tell(self, failure: ProcessFailure, consequence: str = "", logs: Path | None = None) -> int:
        """One line about the failure, and its exit code. `logs`: where they are, if set aside."""
        rank, code = self._first_rank + failure.local_rank, failure.exitcode
        message, callstack = _recorded(failure)
        if code == _MISTAKE and message.startswith(_USER_ERROR):
            warn(f"tputrain: {message.removeprefix(_USER_ERROR)}")  # as one process says it
            return code
        lines = re.findall(r'File "([^"]+)", line (\d+)', callstack)
        place = f" at {lines[-1][0]}:{lines[-1][1]}" if lines and not _is_of_user(message) else ""
        said = f"what it said: {logs or self._logs}/rank-{rank}.err"
        warn(f"tputrain: rank {rank} failed first: {message}{place}; {said}{consequence}")
        return code if code > 0 else 1

    def _set_logs_aside(self) -> Path | None:
        """Where what this host's ranks have said is now; None: they have said nothing yet."""
        ranks = range(self._first_rank, self._first_rank + self._cfg.processes)
        patterns = ["rank-*"] if self._hosts.size == 1 else [f"rank-{rank}.*" for rank in ranks]
        logs = [path for pattern in patterns for path in self._logs.glob(pattern)]
        if not logs:
            return None
        first = f"rank-{self._first_rank}.err"  # hosts set theirs aside at times of their own
        number = 1 + max(
            (each for each in self._earlier() if (self._start(each) / first).exists()), default=0
        )
        self._start(number).mkdir(exist_ok=True)
        for path in logs:
            path.rename(self._start(number) / path.name)
        for old in self._earlier()[:-_KEPT] if self._first_rank == 0 else ():
            shutil.rmtree(self._start(old))
        return self._start(number)

    def _earlier(self) -> list[int]:
        """The numbers of earlier starts whose output is kept, in their order."""
        names = [path.name.removeprefix(_EARLIER) for path in self._logs.glob(f"{_EARLIER}*")]
        return sorted(int(name) for name in names if name.isdecimal())

    def _start(self, number: int) -> Path:
        return self._logs / f"{_EARLIER}{number}"


_UNKNOWN = -1
"""The step of a first rank that was killed in training."""


class _Signals:
    """Context that passes SIGINT and SIGTERM on to the ranks; a second one ends them, and all that they have
    started, at once.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self.has_insisted = False
        """Whether a second one came."""
        self._received_at = 0.0
        self._pids: Sequence[int] = ()
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "_Signals":
        self._before = {number: signal.signal(number, self._handle) for number in WATCHED}
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def pass_on_to(self, pids: Sequence[int]) -> None:
        """To these ranks, from now on; also one that came while they were started."""
        self._pids = pids
        if self.received is not None:
            _send(pids, signal.SIGKILL if self.has_insisted else self.received)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.received is None:
            self.received, self._received_at = number, now
            _send(self._pids, number)
        elif now - self._received_at >= ECHO and not self.has_insisted:
            self.has_insisted = True
            name = signal.Signals(number).name
            warn(f"{name} again: leaving at once, what came after the last checkpoint is lost")
            _send(self._pids, signal.SIGKILL)


def _send(pids: Sequence[int], number: int) -> None:
    """To each rank and what it has started, which is its process group."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.killpg(pid, number)


def _end_groups(pids: Sequence[int]) -> None:
    """Have nothing stay of ranks that have ended: a loader's worker would hold the lock of the run."""
    for pid in pids:
        until = time.monotonic() + _SECONDS_TO_GO
        with suppress(ProcessLookupError):
            while time.monotonic() < until:
                os.killpg(pid, signal.SIGKILL)
                time.sleep(0.02)


def _recorded(failure: ProcessFailure) -> tuple[str, str]:
    """What the rank left of its error, and where that was; or what the system said of its end."""
    message: Any = failure.message
    callstack = ""
    if isinstance(message, dict):
        callstack = str(message.get("extraInfo", {}).get("py_callstack", ""))
        message = message.get("message", "")
    elif failure.exitcode > 0:
        message = f"exit code {failure.exitcode}"  # PyTorch's own words are of its decorator
    return " ".join(str(message).split()), callstack


def _is_of_user(message: str) -> bool:
    """A mistake of the user's, told by its line: where in our code it was found helps nobody."""
    return message.startswith(("UserError", "RunFailedError"))


class _RankLogs(LogsSpecs):
    """Each rank's output and errors in files of its own, the first one's also on the terminal."""

    def __init__(self, directory: Path, first_rank: int):
        super().__init__(str(directory))
        self._directory, self._first_rank = directory, first_rank

    @property
    def root_log_dir(self) -> str:
        return str(self._directory)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        def paths(kind: str, ranks: Sequence[int] = tuple(envs)) -> dict[int, str]:
            return {rank: str(self._directory / f"rank-{self._first_rank + rank}.{kind}") for rank in ranks}

        errors = paths("error.json")
        for rank, path in errors.items():
            Path(path).unlink(missing_ok=True)
            envs[rank]["TORCHELASTIC_ERROR_FILE"] = path
        shown = (0,) if self._first_rank == 0 else ()
        tees = paths("out", shown), paths("err", shown)
        nowhere = os.devnull
        return LogsDest(paths("out"), paths("err"), *tees, errors, nowhere, nowhere)
