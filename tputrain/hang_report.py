"""What is written about a process that hangs, by a thread that must not hang with it."""

import faulthandler
import os
import threading
import time
from pathlib import Path

import torch

from tputrain import device as devices
from tputrain.announce import warn

_PATIENCE = 5.0  # seconds; the counters of a device may be behind a lock that the hanging thread holds


def report_hang(run_dir: Path | None, device: torch.device, reason: str, rank: int | None = None) -> str:
    """Every thread's stack, the device's last operations and its counters, to `run_dir/hang-<time>.txt`, or
    to standard error where there is no file. Of a `rank` the file is `hang-<time>-rank-N.txt`.

    Returns the reason, and where the stacks are.
    """
    if run_dir is not None:
        of_rank = "" if rank is None else f"-rank-{rank}"
        path = run_dir / f"hang-{time.strftime('%Y%m%d-%H%M%S')}{of_rank}.txt"
        try:
            _write_file(path, reason, device)
        except OSError as error:
            warn(f"{path}: the stacks cannot be written there ({error.strerror}); they follow")
        else:
            return f"{reason}; every thread's stack is in {path}"
    _write(2, reason, device)
    return reason


def _write_file(path: Path, reason: str, device: torch.device) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
    try:
        _write(descriptor, reason, device)
    finally:
        os.close(descriptor)


def _write(descriptor: int, reason: str, device: torch.device) -> None:
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    os.write(descriptor, f"{reason}\n\nthreads: {names}\n\n".encode())
    faulthandler.dump_traceback(file=descriptor, all_threads=True)
    recent = [f"  {line}" for line in devices.recent_ops(device)]
    if recent:
        text = "\n".join([f"the last operations on {device}, oldest first:", *recent])
        os.write(descriptor, f"\n{text}\n".encode())
    os.write(descriptor, f"\n{_device_counters(device)}\n".encode())


def _device_counters(device: torch.device) -> str:
    counters: list[str] = []
    asking = threading.Thread(target=lambda: counters.append(devices.describe_counters(device)), daemon=True)
    asking.start()
    asking.join(_PATIENCE)
    return counters[0] if counters else f"{device}: did not answer within {_PATIENCE:.0f} s"
