"""The memory of a training step by the length of its sequence: it grows with the length, not with its square.

    python -m tests.benchmarks.attention_memory --lengths 1024 8192 32768

One sequence of two documents, AdamW, float32, fused mode; activations are kept unless `--recompute` is given.
Each length is measured in a process of its own. Peak RSS is that of the whole process.
Bars: 2 GB of RSS for 8,192 tokens with `--recompute`; temporaries per token that do not grow.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from dataclasses import replace

import torch

from tests.backend.fresh_process import found_by
from tests.benchmarks import torch_step
from tests.benchmarks.bars import Row, print_table
from tputrain.models.llama import LLAMA_CONFIGS

LENGTHS = (1024, 2048, 4096, 8192, 16_384, 32_768)
MIB = 2**20
MOST_RSS = 2000 * 10**6
"""Of the step of the 20M model on 8,192 tokens."""


def measure(name: str, length: int, recomputes: bool, steps: int) -> dict[str, float]:
    """Bytes and seconds of training steps, in this process."""
    config = replace(LLAMA_CONFIGS[name], activation_checkpointing=recomputes)
    batch = torch_step.llama_batch(config, 1, length)
    step = torch_step.TrainingStep(torch_step.llama(config), torch_step.llama_loss, batch, "tpu")
    seconds = []
    with torch.tpu.eager_mode("fused", parts="never"):
        for _ in range(steps):
            began = time.perf_counter()
            loss = step().item()
            torch.tpu.synchronize()
            seconds.append(time.perf_counter() - began)
    assert 0 < loss < 20
    stats = torch.tpu.memory_stats()
    return {
        "length": length,
        "rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "temporaries": stats["executable_temp_bytes"],
        "seconds": min(seconds[1:], default=seconds[0]),
    }


def measured(name: str, length: int, recomputes: bool, steps: int) -> dict[str, float]:
    """The same, in a process of its own."""
    given = ["--model", name, "--own", length, "--steps", steps, *["--recompute"] * recomputes]
    return found_by("tests.benchmarks.attention_memory", *given)


def main() -> bool:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=sorted(LLAMA_CONFIGS), default="llama-20m")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--recompute", action="store_true", help="activation checkpointing")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--own", type=int, help="measure this length in this process, as JSON")
    given = parser.parse_args()
    if given.own is not None:
        print(json.dumps(measure(given.model, given.own, given.recompute, given.steps)))
        return True
    print("| tokens | peak RSS MB | temporaries MiB | KiB a token | step s |\n|---|---|---|---|---|")
    found = []
    for length in given.lengths:
        found.append(each := measured(given.model, length, given.recompute, given.steps))
        print(
            f"| {length:,} | {each['rss'] / 1e6:,.0f} | {each['temporaries'] / MIB:,.0f} | "
            f"{each['temporaries'] / length / 1024:.1f} | {each['seconds']:.2f} |",
            flush=True,
        )
    first, last = found[0], found[-1]
    growth = last["temporaries"] / last["length"] / (first["temporaries"] / first["length"])
    rows = [Row("temporaries a token: longest / shortest", growth, "<=", 1.1)]
    for each in found:
        if given.recompute and given.model == "llama-20m" and each["length"] == 8192:
            rows.append(Row("8,192 tokens: RSS / 2 GB", each["rss"] / MOST_RSS, "<=", 1.0))
    return print_table(rows)


if __name__ == "__main__":
    sys.exit(not main())
