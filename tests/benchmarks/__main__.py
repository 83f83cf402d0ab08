"""Run every benchmark, each in a fresh process, and print one table; exits with 1 where a bar is missed."""

import sys
import time
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from multiprocessing import get_context

from tests.benchmarks.bars import Row, print_table

BENCHMARKS = (
    "steady_state",
    "changing_shapes",
    "generate",
    "recipe_steady_state",
    "dispatch",
    "mlp_step",
    "llama_step",
    "first_step",
    "memory",
    "compile_step",
    "small_step",
    "epochs",
    "trainer",
    "fsdp_step",
    "rank_start",
)


def main() -> int:
    rows: list[Row] = []
    # A fresh process each: nobody inherits another's buffers, caches or compiled programs.
    with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        for benchmark in BENCHMARKS:
            print(f"{benchmark} ...", end=" ", flush=True)
            start = time.perf_counter()
            rows += pool.submit(import_module(f"tests.benchmarks.{benchmark}").rows).result()
            print(f"{time.perf_counter() - start:.0f} s", flush=True)
    print()
    return 0 if print_table(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
