"""A rank's side of its launcher: whom it ends with, what it leaves for it, who speaks of an error."""

import ctypes
import os
import signal
import sys
import tempfile
import threading
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from types import TracebackType

from tputrain.errors import RunFailedError, UserError

RUN_ID = "tputrain"
"""Of our launcher, by which its processes know it."""

LAUNCHER = "TPUTRAIN_LAUNCHER"
"""Variable: the process that started this one as a rank, if that is `tputrain run`."""
STOPPED_BY = "TPUTRAIN_STOPPED_BY"
"""Variable: the file in which that process looks for the signal at which the ranks stopped."""
_AGENT = "TORCHELASTIC_RUN_ID"  # torchrun's, and ours
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_writing_error = threading.Lock()


def end_with_launcher() -> None:
    """Have the system send SIGTERM when the launcher has gone, however it went: the ranks save, and leave."""
    # Taken away: a command that this process starts has another parent.
    launcher = os.environ.pop(LAUNCHER, None)
    if launcher is None:
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(launcher):  # it went before
        os.kill(os.getpid(), signal.SIGTERM)


def exit_code_of_stop(number: int) -> int:
    """What a rank ends with after a common save at signal `number`.

    An agent starts ranks again unless they end with 0. Ours is told of the signal beside that.
    """
    if _AGENT not in os.environ:
        return 128 + number
    if (path := os.environ.get(STOPPED_BY)) is not None:
        descriptor = os.open(path, os.O_WRONLY)  # not emptied: a full disk takes what replaces two digits
        os.write(descriptor, f"{number:02}".encode())
        os.close(descriptor)
    return 0


def is_launched() -> bool:
    """Whether a launcher, torchrun or our own, started this process as one of several."""
    return "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


def is_ours() -> bool:
    """Whether our launcher started this process: it keeps what each rank says apart; torchrun prints it."""
    return os.environ.get(_AGENT) == RUN_ID


def launched_by() -> str:
    """What was typed before `tputrain` to start this process and the ranks beside it; empty: nothing."""
    if is_ours() or _AGENT not in os.environ or os.environ.get("GROUP_WORLD_SIZE") != "1":
        return ""
    return f"torchrun --nproc-per-node {os.environ['LOCAL_WORLD_SIZE']} -m "


def record_error(error: BaseException) -> None:
    """Leave the error for whoever started this rank, ours or torchrun, and tell the other ranks of it."""
    if not is_launched() or "torch" not in sys.modules:
        return
    # Only now: the command reads this file before it imports PyTorch.
    from tputrain import device as devices

    if isinstance(error, UserError | RunFailedError):
        error = error.with_traceback(None)  # torchrun would print where in our code it was found
        error.__cause__, error.__suppress_context__ = None, True
    if os.environ.get(_ERROR_FILE):  # torchrun's may be empty: then it wants none
        with suppress(OSError):  # it may be on the disk whose end this is
            _write_error_file(error)
    # A RuntimeError may be what a collective says of another rank's end, which is told of already.
    if not isinstance(error, RuntimeError):
        devices.tell_ranks(error)


def _write_error_file(error: BaseException) -> None:
    """The whole file or none: a launcher that finds a part of one does not survive it."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    with _writing_error:  # the watchdog's thread may record an error, too
        whole = os.environ[_ERROR_FILE]
        os.environ[_ERROR_FILE] = part = f"{whole}.part"
        try:
            get_error_handler().record_exception(error)
            os.replace(part, whole)
        finally:
            os.environ[_ERROR_FILE] = whole
            Path(part).unlink(missing_ok=True)


def speaks(line: str) -> bool:
    """Whether this process says what ends it, after `record_error`: of several ranks one does."""
    return not is_launched() or not (_is_told_by_launcher() or _is_said(line))


def speak_in_one_line() -> None:
    """Have what a script can mend, and does not catch, be one line of one rank, not a traceback of each."""
    shown = sys.excepthook

    def shows(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, UserError | RunFailedError):
            record_error(error)
            if speaks(str(error)):
                print(f"tputrain: {error}", file=sys.stderr, flush=True)
        else:
            shown(kind, error, trace)

    sys.excepthook = shows


def _is_told_by_launcher() -> bool:
    """Whether our launcher reads what was recorded, on the terminal on which this rank speaks, too."""
    if not is_ours() or os.environ["RANK"] != "0":
        return False
    recorded = Path(os.environ[_ERROR_FILE])
    return recorded.exists() and recorded.stat().st_size > 0


def _is_said(line: str) -> bool:
    """Whether another rank has said the line on this terminal, as far as that can be known; now it is."""
    if is_ours():
        return False  # each has a file of its own
    if os.environ.get(_ERROR_FILE):
        directory = Path(os.environ[_ERROR_FILE]).parents[1]  # torchrun's, of one start of the ranks
    elif "SLURM_STEP_ID" in os.environ:
        step = f"{os.environ['SLURM_JOB_ID']}.{os.environ['SLURM_STEP_ID']}"
        directory = Path(tempfile.gettempdir()) / f"tputrain-{os.getuid()}-{step}"
    else:
        return False
    mark = directory / f".said-{blake2b(line.encode(), digest_size=8).hexdigest()}"
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
        os.close(os.open(mark, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError:
        return True
    except OSError:
        return False
    return False
