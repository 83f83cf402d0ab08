"""Starts the ranks of a run on this machine, and says how they ended."""

import logging
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs
from torch.distributed.elastic.multiprocessing.errors import (
    ChildFailedError,
    ProcessFailure,
    get_error_handler,
)
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from tputrain.announce import say, warn
from tputrain.errors import UserError
from tputrain.parallel.world import RUN_ID

LOGS = "ranks"
"""In the run directory: what each rank said, `rank-0.out` and `rank-0.err`."""
_SECONDS_TO_SAVE = 120


def launch(num_processes: int, run_dir: Path, arguments: Sequence[str]) -> int:
    """Run `tputrain ARGUMENTS` as each of `num_processes` ranks; returns the exit code of the command.

    What the first rank says is shown here, too. The first error is told with its rank and line. After SIGINT
    or SIGTERM all ranks save, together, and the code is 130 or 143.
    """
    for name in [*logging.root.manager.loggerDict]:
        if name.startswith("torch.distributed."):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # what they say is told here, in one line
    try:
        logs = _RankLogs(run_dir / LOGS)
    except OSError as error:
        raise UserError(f"run_dir={run_dir}: cannot write there ({error.strerror}); take another") from None
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_processes,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        run_id=RUN_ID,
        max_restarts=0,
        logs_specs=logs,
        role="",
        log_line_prefix_template="${role_name}",
        signals_to_handle="SIGTERM,SIGINT",
        shutdown_timeout=_SECONDS_TO_SAVE,
        local_addr="localhost",
    )
    say(f"starting {num_processes} ranks; what each says: {run_dir / LOGS}")
    try:
        elastic_launch(config, sys.executable)("-u", "-m", "tputrain", *arguments)
    except ChildFailedError as error:
        return _tell(*error.get_first_failure(), run_dir / LOGS)
    except SignalException as stopped:
        return 128 + stopped.sigval
    return 0


def record_error(error: BaseException) -> None:
    """In a rank: leave the error for whoever started it, ours or torchrun."""
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        get_error_handler().record_exception(error)


def _tell(rank: int, failure: ProcessFailure, logs: Path) -> int:
    code = failure.exitcode
    if code in (130, 143):
        return code
    message, callstack = _recorded(failure)
    lines = re.findall(r'File "([^"]+)", line (\d+)', callstack)
    place = f" at {lines[-1][0]}:{lines[-1][1]}" if lines and not _is_of_user(message) else ""
    warn(f"tputrain: rank {rank} failed first: {message}{place}; what it said: {logs}/rank-{rank}.err")
    return code if code > 0 else 1


def _recorded(failure: ProcessFailure) -> tuple[str, str]:
    """What the rank left of its error, and where that was; or what the system said of its end."""
    message: Any = failure.message
    callstack = ""
    if isinstance(message, dict):
        callstack = str(message.get("extraInfo", {}).get("py_callstack", ""))
        message = message.get("message", "")
    return " ".join(str(message).split()), callstack


def _is_of_user(message: str) -> bool:
    """A mistake of the user's, told by its line: where in our code it was found helps nobody."""
    return message.startswith(("UserError", "RunFailedError"))


class _RankLogs(LogsSpecs):
    """Each rank's output and errors in files of its own, the first one's also on the terminal."""

    def __init__(self, directory: Path):
        directory.mkdir(parents=True, exist_ok=True)
        super().__init__(str(directory))
        self._directory = directory

    @property
    def root_log_dir(self) -> str:
        return str(self._directory)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        def paths(kind: str, ranks: Sequence[int] = tuple(envs)) -> dict[int, str]:
            return {rank: str(self._directory / f"rank-{rank}.{kind}") for rank in ranks}

        errors = paths("error.json")
        for rank, path in errors.items():
            Path(path).unlink(missing_ok=True)
            envs[rank]["TORCHELASTIC_ERROR_FILE"] = path
        tees = paths("out", (0,)), paths("err", (0,))
        nowhere = os.devnull
        return LogsDest(paths("out"), paths("err"), *tees, errors, nowhere, nowhere)
