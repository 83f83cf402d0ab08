"""A data worker that died, named in one line wherever PyTorch notices it."""

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager

# What torch.utils.data says, from its signal handler (one process) or where it waits for a batch.
_DEATH = re.compile(
    r"DataLoader worker \(pid(?:\(s\))? (?P<pids>[\d, ]+)\) "
    r"(?:is killed by signal: (?P<signal>[^.]+)|exited unexpectedly(?: with exit code (?P<code>\d+))?)"
)

_NOTICE = 2.0  # seconds from a broken connection to the news that its process died, at most


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
        except (ConnectionError, EOFError):
            # A dying worker's connection breaks before the system tells of its death: that is raised in here.
            time.sleep(_NOTICE)
            raise
    except RuntimeError as error:
        found = _DEATH.search(str(error))
        if found is None:
            raise
        raise DataWorkerError(_line(found)) from error


def _line(found: re.Match[str]) -> str:
    how = "ended, killed or crashed"
    if found["signal"]:
        how = f"was killed by a signal ({found['signal'].strip()})"
    elif found["code"]:
        how = f"ended with exit code {found['code']}"
    return (
        f"data worker (pid {found['pids']}) {how}, so no more batches come: the machine may be out of memory "
        "(fewer workers, smaller batches); run again to go on from the newest checkpoint, if there is one; "
        "with 0 workers you see an error of the data's own"
    )
