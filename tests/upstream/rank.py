"""One rank: runs the tests that its launcher names, one a line, and says of each what became of it.

    python -m tests.upstream.rank FILE WORLD_SIZE RANK DIRECTORY

Lines in: {"test": "Class.test_name", "number": 3}. Lines out (on the file descriptor that stdout was): the
tests of the file, then {"outcome": "passed", "why": "", "seconds": 0.1, "is_clean": true} a test.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
import traceback
import unittest
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

SECONDS = 40.0  # that a collective waits for other ranks


def load(file: Path, world_size: int) -> ModuleType:
    """The test file as a module, with the device in CUDA's place."""
    from tests.upstream import stand_in

    stand_in.install(world_size, os.environ["BACKEND"])
    spec = importlib.util.spec_from_file_location(f"upstream_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    with stand_in.asked_at_import(world_size):
        spec.loader.exec_module(module)
    stand_in.show(module)
    return module


def tests_of(module: ModuleType) -> dict[str, Any]:
    """The classes of the tests, by "Class.test_name"."""
    classes = [each for each in vars(module).values() if isinstance(each, type)]
    classes = [each for each in classes if each.__module__ == module.__name__]
    if hasattr(module, "DistributedTest"):  # its tests are a mixin, which the file that spawns them completes
        base = module.DistributedTest._DistTestBase
        classes = [type("TestDistBackendWithSpawn", (module.TestDistBackend, base), {})]
    return {
        f"{each.__name__}.{name}": each
        for each in classes
        if issubclass(each, unittest.TestCase)
        for name in unittest.TestLoader().getTestCaseNames(each)
    }


def begin(rank: int, world_size: int, store: str, seconds: float) -> None:
    """Make the world of one test. Raises AssertionError if it is not one of processes and of the device."""
    import jax
    import torch
    import torch.distributed as dist

    dist.init_process_group(
        "tpu",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=seconds),
    )
    assert dist.get_world_size() == jax.process_count() == jax.device_count() == world_size
    assert jax.local_device_count() == 1
    assert dist.group.WORLD._get_backend(torch.device("tpu")).name() == "tpu"


def run(case: type, name: str, rank: int, world_size: int, store: str, module: ModuleType) -> tuple[str, str]:
    """What becomes of a test, and why."""
    import torch.distributed as dist
    from torch.testing._internal import common_distributed, common_utils

    limits = getattr(module, "CUSTOM_PG_TIMEOUT", {})
    for each in (case, getattr(case, name)):
        if getattr(each, "__unittest_skip__", False):
            return "skipped", each.__unittest_skip_why__
    try:
        begin(rank, world_size, store, limits.get(name, SECONDS))
        test: Any = case(name)
        test.rank, test.file_name = rank, f"{store}.test"
        common_utils.set_rng_seed()
        getattr(test, name)()
        if dist.is_initialized():
            module_barrier = getattr(test, "_barrier", None)
            if module_barrier is not None:
                module_barrier()
            dist.destroy_process_group()
    except unittest.SkipTest as skip:
        return "skipped", str(skip)
    except SystemExit as end:
        skips = {each.exit_code: each.message for each in common_distributed.TEST_SKIPS.values()}
        return ("skipped", skips[end.code]) if end.code in skips else ("failed", f"ended with {end.code}")
    except BaseException as error:
        traceback.print_exc()
        lines = str(error).strip().splitlines() or [""]
        return "failed", f"{type(error).__name__}: {lines[0]}"
    return "passed", ""


def main(file: str, world_size: int, rank: int, directory: str) -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what tests print
    module = load(Path(file), world_size)
    tests = tests_of(module)
    print(json.dumps(list(tests)), file=out, flush=True)

    import torch.distributed as dist

    from tpu_backend.distributed import peers

    for line in sys.stdin:
        asked = json.loads(line)
        test = asked["test"]
        print(f"==== {test}", file=sys.stderr, flush=True)
        began = time.monotonic()
        store = f"{directory}/store-{asked['number']}"
        outcome, why = run(tests[test], test.partition(".")[2], rank, world_size, store, module)
        is_clean = peers.world is None or peers.world.failure() is None
        if dist.is_initialized():
            if outcome == "skipped":
                dist.destroy_process_group()
            else:
                is_clean = False
        report = {"outcome": outcome, "why": why, "seconds": time.monotonic() - began, "is_clean": is_clean}
        print(json.dumps(report), file=out, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
