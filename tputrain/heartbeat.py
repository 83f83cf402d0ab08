"""The heartbeat of a run, `run_dir/heartbeat.json`: what it is doing, for whoever looks from outside.

One object: `pid`, `host`, `step` (optimizer steps done), `phase`, `seconds` (spent in that phase so far) and
`time` (of writing, seconds since 1970). A `time` that is long past in a phase other than ENDED or FAILED is a
process that died.
"""

import json
import os
import socket
import time
from pathlib import Path
from typing import Any

FILE = "heartbeat.json"
ENDED = "ended"
FAILED = "failed"


def write_heartbeat(run_dir: Path, step: int, phase: str, seconds: float) -> None:
    """Replace the heartbeat at once: a reader sees the old one or the new one. Raises OSError."""
    beat = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "step": step,
        "phase": phase,
        "seconds": round(seconds, 1),
        "time": round(time.time(), 3),
    }
    written = run_dir / f"{FILE}.new"
    written.write_text(json.dumps(beat) + "\n", encoding="utf-8")
    os.replace(written, run_dir / FILE)


def read_heartbeat(run_dir: Path | str) -> dict[str, Any] | None:
    """The last heartbeat of a run, None where there is none that can be read."""
    try:
        beat = json.loads((Path(run_dir) / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return beat if isinstance(beat, dict) else None
