"""A data worker that died, named in one line wherever PyTorch notices it."""

import re
import signal
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess

from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

# What torch.utils.data says, from its signal handler (one process) or where it waits for a batch.
_DEATH = re.compile(
    r"DataLoader worker \(pid(?:\(s\))? (?P<pids>[\d, ]+)\) "
    r"(?:is killed by signal: (?P<signal>[^.]+)|exited unexpectedly(?: with exit code (?P<code>\d+))?)"
)

_WAITS_FOR_A_BATCH = _MultiProcessingDataLoaderIter._try_get_data.__code__
_KILLED_OR_CRASHED = "ended, killed or crashed"
_NOTICE = 20.0  # seconds from a broken connection until its process counts as dead, at most


class DataWorkerError(RuntimeError):
    """A process that makes batches ended, so no more data comes; one line says which and how."""


@contextmanager
def deaths_named() -> Iterator[None]:
    """What PyTorch raises for a dead worker of a DataLoader, inside, becomes a DataWorkerError.

    PyTorch raises it in the main thread at any instruction, so one place around the whole loop is the right
    one.
    """
    try:
        try:
            yield
        except (ConnectionError, EOFError, FileNotFoundError) as error:
            # A dying worker's connection breaks before the system tells of its death.
            if (dead := _await_a_death(error)) is not None:
                raise DataWorkerError(_line(str(dead.pid), _end_of(dead.exitcode))) from error
            raise
    except RuntimeError as error:
        found = _DEATH.search(str(error))
        if found is None:
            raise
        how = _KILLED_OR_CRASHED
        if found["signal"]:
            how = f"was killed by a signal ({found['signal'].strip()})"
        elif found["code"]:
            how = f"ended with exit code {found['code']}"
        raise DataWorkerError(_line(found["pids"], how)) from error


def _await_a_death(error: BaseException) -> BaseProcess | None:
    """The worker that ended, of those whose batch was waited for where `error` came from.

    An error that a living worker sent, of the data's own, comes from elsewhere: nothing is waited for.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    waiting = [frame.f_locals["self"] for frame in frames if frame.f_code is _WAITS_FOR_A_BATCH]
    workers = [worker for iterator in waiting for worker in iterator._workers]
    until = time.monotonic() + _NOTICE
    while workers and time.monotonic() < until:
        for worker in workers:
            if not worker.is_alive():
                return worker
        time.sleep(0.05)
    return None


def _end_of(exitcode: int | None) -> str:
    if exitcode is not None and exitcode < 0:
        return f"was killed by a signal ({signal.strsignal(-exitcode)})"
    return _KILLED_OR_CRASHED if not exitcode else f"ended with exit code {exitcode}"


def _line(pids: str, how: str) -> str:
    return (
        f"data worker (pid {pids}) {how}, so no more batches come: the machine may be out of memory "
        "(fewer workers, smaller batches); run again to go on from the newest checkpoint, if there is one; "
        "with 0 workers you see an error of the data's own"
    )
