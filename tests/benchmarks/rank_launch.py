"""Runs a benchmark's module in several processes of this machine, by torchrun."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run_ranks(module: str, world: int, *arguments: object) -> None:
    """As `python -m module ARGUMENTS` in each of `world` ranks; all of them must end well."""
    launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
    subprocess.run(
        [sys.executable, "-m", *launcher, "-m", module, *map(str, arguments)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "TPU_CACHE_DIR": "none"},
        check=True,
    )
