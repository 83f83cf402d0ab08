"""The command line with a fault inside one of its ranks.

    python -m tests.acceptance.faulty_ranks FAULT STEP RANK run RECIPE ...

FAULT is what becomes of that rank's step STEP, counted from its start, where the ranks are started for the
first time; started again they do nothing of the kind:

    raises   it raises an exception
    stuck    it never returns: its thread waits in C, as one does for a device that does not answer
    nan      a weight of this rank is not a number before it
    full     the first checkpoint after it finds no room for what this rank writes
"""

import ctypes
import errno
import os
import sys
from pathlib import Path
from typing import Any

import torch

from tests.tputrain.hanging_run import hang
from tputrain.cli import main
from tputrain.parallel import launch

_FAULTS = ("raises", "stuck", "nan", "full")


def start_faulty_rank(fault: str, step: str, rank: int) -> None:
    """Have the launcher start one rank of its first start as this program."""
    start_processes, num_started = launch.start_processes, 0

    def started(*, args: dict[int, tuple[str, ...]], **named: Any) -> Any:
        nonlocal num_started
        num_started += 1
        if num_started == 1:
            _, _, _, *arguments = args[rank]  # -u -m tputrain
            args[rank] = ("-u", "-m", "tests.acceptance.faulty_ranks", fault, step, str(rank), *arguments)
        return start_processes(args=args, **named)

    launch.start_processes = started


def break_step(fault: str, step: int) -> None:
    """Have this process, which is a rank, do as `fault` says."""
    from tputrain.loop.step import TrainStep
    from tputrain.snapshot.snapshot import Snapshot

    take_step, write_rows = TrainStep.__call__, Snapshot.write_rows
    is_done, number = False, 0

    def faulty_step(self: TrainStep, *arguments: Any, **named: Any) -> Any:
        nonlocal is_done, number
        number += 1
        if not is_done and number >= max(step, 2) and fault != "full":
            is_done = True
            if fault == "raises":
                raise ValueError("a fault of this rank")
            if fault == "stuck":
                hang(ctypes.CDLL(None))
            with torch.no_grad():
                next(each for each in self.parameters if each.to_local().numel()).to_local().fill_(torch.nan)
        return take_step(self, *arguments, **named)

    def faulty_rows(self: Snapshot, directory: Path) -> Any:
        nonlocal is_done
        if fault == "full" and number >= step and not is_done:
            is_done = True
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(directory))
        return write_rows(self, directory)

    TrainStep.__call__ = faulty_step
    Snapshot.write_rows = faulty_rows


if __name__ == "__main__":
    kind, number, whom, *rest = sys.argv[1:]
    if kind not in _FAULTS:
        raise SystemExit(f"{kind}: expected one of {', '.join(_FAULTS)}")
    if "RANK" in os.environ:
        break_step(kind, int(number))
    else:
        start_faulty_rank(kind, number, int(whom))
    sys.exit(main(rest))
