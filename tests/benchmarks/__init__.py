"""Figures against bars: `python -m tests.benchmarks` runs all of them, `python -m tests.benchmarks.NAME` one.

Native PyTorch's OpenMP threads spin while they wait, by default, and then take the cores from whatever is
measured next in the same process: every comparison is made with OMP_WAIT_POLICY=passive.  The library reads
it when it is loaded, so a benchmark that was started without it starts itself again, before torch is
imported.
"""

import os
import sys
from itertools import pairwise


def _started_as_benchmark() -> bool:
    arguments = sys.orig_argv
    return any(a == "-m" and b.startswith(__name__) for a, b in pairwise(arguments))


os.environ.setdefault("TPU_CACHE_DIR", "none")  # what is timed is compiled
if _started_as_benchmark() and os.environ.get("OMP_WAIT_POLICY") != "passive":
    os.environ["OMP_WAIT_POLICY"] = "passive"
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
