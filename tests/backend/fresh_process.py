"""Runs a script or a module in a new Python: for what only the first use of the device, the end of a process,
or a process that does nothing else can show.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PYTHONPATH = os.pathsep.join(filter(None, [str(ROOT / "backend"), str(ROOT), os.environ.get("PYTHONPATH")]))
"""Variable: with it a Python in any directory has the modules of this checkout, and those of tests."""


class FailedProcessError(Exception):
    """A process has ended with an error; the last line that it said. A note has more of them."""


def environment_of_tests() -> dict[str, str]:
    """Without the device's own variables; no program is kept in the home of whoever runs the tests."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TPU_")}
    return {**inherited, "PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "1", "TPU_CACHE_DIR": "none"}


def run_python(
    script: str, *, timeout: float = 120, **environment: str | None
) -> subprocess.CompletedProcess[str]:
    """Run `script` with these variables beside the `environment_of_tests`. None: unset."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env=_with(environment_of_tests(), environment),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def found_by(module: str, *arguments: object, **environment: str | None) -> Any:
    """The JSON on the last line of `python -m module arguments`, run with these environment variables added.

    None: unset. Raises FailedProcessError.
    """
    done = subprocess.run(
        [sys.executable, "-m", module, *map(str, arguments)],
        env=_with({**os.environ, "PYTHONPATH": PYTHONPATH}, environment),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        error = FailedProcessError((done.stderr.strip().splitlines() or ["no word"])[-1])
        error.add_note(f"{module} {arguments}, exit code {done.returncode}:\n{done.stderr[-2000:]}")
        raise error
    return json.loads(done.stdout.splitlines()[-1])


def _with(variables: dict[str, str], chosen: dict[str, str | None]) -> dict[str, str]:
    return {name: value for name, value in (variables | chosen).items() if value is not None}
