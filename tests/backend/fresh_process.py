"""Runs a script in a new Python: for what only the first use of the device, or the end of a process, can
show.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run_python(
    script: str, *, timeout: float = 120, **environment: str | None
) -> subprocess.CompletedProcess[str]:
    """Run `script` with these environment variables added; the device's own variables are otherwise unset,
    but that no program is kept in the home of whoever runs the tests. None: unset.
    """
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TPU_")}
    paths = [str(ROOT / "backend"), str(ROOT), inherited.get("PYTHONPATH", "")]
    chosen: dict[str, str | None] = {
        **inherited,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "OMP_NUM_THREADS": "1",
        "TPU_CACHE_DIR": "none",
        **environment,
    }
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env={name: value for name, value in chosen.items() if value is not None},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
