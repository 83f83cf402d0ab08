"""A rank's side of its launcher: whom it ends with, and what it leaves behind for it."""

import ctypes
import os
import signal
from pathlib import Path

LAUNCHER = "TPUTRAIN_LAUNCHER"
"""Variable: the process that started this one as a rank, if that is `tputrain run`."""
STOPPED_BY = "TPUTRAIN_STOPPED_BY"
"""Variable: the file in which that process looks for the signal at which the ranks stopped."""
_AGENT = "TORCHELASTIC_RUN_ID"  # torchrun's, and ours
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


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
        Path(path).write_text(str(number), encoding="ascii")
    return 0


def record_error(error: BaseException) -> None:
    """Leave the error for whoever started this rank, ours or torchrun, and tell the other ranks of it."""
    if "TORCHELASTIC_ERROR_FILE" not in os.environ:
        return
    # Only now: the command reads this file before it imports PyTorch.
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    from tputrain import device as devices

    get_error_handler().record_exception(error)
    # A RuntimeError may be what a collective says of another rank's end, which is told of already.
    if not isinstance(error, RuntimeError):
        devices.tell_ranks(error)
