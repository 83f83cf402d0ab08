"""Which process a launcher has started as a rank: it, and none of its children, is to wait for the others.

A launcher (torchrun and others) says by environment variables which rank a process is. The loader workers and
subprocesses of that process inherit them, and are no ranks. No parent's name tells the two apart: there are
many launchers, and shells between. So the first process with these variables that imports torch leaves its
number beside them.
"""

from __future__ import annotations

import multiprocessing
import os
import sys

_SAYING = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
_MARK = "TPU_LAUNCHED_PROCESS"


def _said() -> str | None:
    """What a launcher said, if all of it is there."""
    values = [os.environ.get(name, "") for name in _SAYING]
    return " ".join(values) if all(values[:4]) else None


def mark() -> None:
    """To be called at `import torch`."""
    said = _said()
    if said is None or multiprocessing.parent_process() is not None:
        return
    if os.environ.get(_MARK, "").partition(" ")[2] != said:  # else an ancestor is this rank
        os.environ[_MARK] = f"{os.getpid()} {said}"


def is_one_of_many() -> bool:
    """Whether a launcher has started this very process, as a rank beside others."""
    said = _said()
    if said is None or os.environ["WORLD_SIZE"] == "1":
        return False
    return os.environ.get(_MARK) == f"{os.getpid()} {said}"


def is_spawned() -> bool:
    """Whether multiprocessing has started this process, as `mp.spawn` does. `parent_process()` is still None
    while this process imports the script.
    """
    return multiprocessing.parent_process() is not None or "--multiprocessing-fork" in sys.orig_argv


def is_its(host: str, port: int) -> bool:
    """Whether the launcher named this as the place where its ranks meet."""
    return (os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")) == (host, str(port))
