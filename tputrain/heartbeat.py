"""The heartbeat of a run, `run_dir/heartbeat.json`: what it is doing, for whoever looks from outside.

Of several ranks that is the first one's; the others have `run_dir/ranks/heartbeat-N.json`. One object: `pid`,
`host`, `step` (optimizer steps done), `phase`, `seconds` (spent in that phase so far) and `time` (of writing,
seconds since 1970). A `time` that is long past in a phase other than ENDED or FAILED is a process that died.
"""

import json
import os
import socket
import time
from pathlib import Path
from typing import Any

FILE = "heartbeat.json"
RANKS = "ranks"
"""In the run directory: what is of one rank, such as its log and its heartbeat."""
ENDED = "ended"
FAILED = "failed"


def write_heartbeat(run_dir: Path, step: int, phase: str, seconds: float, rank: int = 0) -> None:
    """Replace the heartbeat at once: a reader sees the old one or the new one. Raises OSError."""
    beat = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "step": step,
        "phase": phase,
        "seconds": round(seconds, 1),
        "time": round(time.time(), 3),
    }
    path = _path(run_dir, rank)
    if rank:
        path.parent.mkdir(exist_ok=True)
    written = path.with_suffix(".json.new")
    written.write_text(json.dumps(beat) + "\n", encoding="utf-8")
    os.replace(written, path)


def read_heartbeat(run_dir: Path | str, rank: int = 0) -> dict[str, Any] | None:
    """The last heartbeat of a run, None where there is none that can be read."""
    try:
        beat = json.loads(_path(Path(run_dir), rank).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return beat if isinstance(beat, dict) else None


def _path(run_dir: Path, rank: int) -> Path:
    return run_dir / FILE if rank == 0 else run_dir / RANKS / f"heartbeat-{rank}.json"
