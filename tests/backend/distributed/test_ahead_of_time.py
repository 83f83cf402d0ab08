"""What the TPU compiler makes of FSDP2's step; no TPU has to be here."""

import json
import math
import os
import subprocess
import sys

from tests.backend.distributed.sharded_step import HIDDEN, LAYERS, WIDTH
from tests.backend.fresh_process import PYTHONPATH, ROOT
from tests.tpu.test_compile import needs_compiler


@needs_compiler
def test_each_gradient_of_a_matrix_is_scattered_and_each_parameter_is_gathered_in_its_own_dims():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.backend.distributed.sharded_step"],
        env={**os.environ, "PYTHONPATH": PYTHONPATH, "TPU_PLATFORM": "cpu"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for chip, collectives in json.loads(done.stdout.splitlines()[-1]).items():
        shapes = {kind: [] for kind, _, _ in collectives}
        for kind, results, _ in collectives:
            shapes[kind] += [tuple(dims) for _, dims in results]
        scattered = shapes.get("reduce-scatter", []) + shapes.get("all-reduce-scatter", [])
        for matrix in ((HIDDEN, WIDTH), (WIDTH, HIDDEN)):
            part = (matrix[0] // 4, matrix[1])
            assert scattered.count(part) == LAYERS, (chip, shapes)
            assert matrix in shapes["all-gather"], (chip, shapes)
        # A norm's gradient is a vector: XLA reduces them all at once.
        assert all(math.prod(dims) <= WIDTH for dims in shapes.get("all-reduce", [])), (chip, shapes)
