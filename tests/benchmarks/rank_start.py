"""The cold start of four ranks on this machine's CPU against that of one rank, of the 5M Llama.

`python -m tests.benchmarks.rank_start`. From the first operation (the model goes to the device) to the end of
the first training step, with nothing on disk. All train on the same global batch in a region, by FSDP2; the
plain step of one process, without FSDP2, is reported beside them. Bars: the slowest of four ranks takes at
most 1.5 times as long as the one rank; and no program is compiled twice. They take turns, each in fresh
processes, after imports and the start of the group.
"""

import json
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from tests.benchmarks.bars import Row, print_table
from tests.benchmarks.interleaved import Timing
from tests.benchmarks.rank_launch import run_ranks

RANKS = 4


def rank(kind: str, directory: Path) -> None:
    """What each process runs, "fsdp2" or "plain"; it writes what it found to a file of its own."""
    import torch
    from torch import distributed as dist

    from tests.benchmarks import torch_step
    from tests.benchmarks.fsdp_step import ShardedStep
    from tpu_backend import executable_cache
    from tpu_backend.runtime import compiler

    assert executable_cache.current() is None
    keys: list[str] = []
    compiled = compiler._compiled

    def compiled_and_noted(*args: Any) -> Any:
        made = compiled(*args)
        keys.append(made.key)
        return made

    compiler._compiled = compiled_and_noted
    dist.init_process_group("tpu")
    dist.barrier()
    model = torch_step.llama()
    keys.clear()
    began, cpu_began = time.perf_counter(), time.process_time()
    if kind == "plain":
        batch = torch_step.llama_batch()
        step = torch_step.TrainingStep(model, torch_step.llama_loss, batch, "tpu")
        step.step = torch.tpu.spmd(step._step)
    else:
        step = ShardedStep(model, "tpu")
    step()
    torch.tpu.synchronize()
    found = {
        "seconds": time.perf_counter() - began,
        "cpu_seconds": time.process_time() - cpu_began,
        "keys": keys,
    }
    (directory / f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


class Start(NamedTuple):
    """Of so many ranks: the seconds of the slowest, the CPU's seconds of all, and what was compiled."""

    seconds: float
    cpu_seconds: float
    num_programs: int
    num_repeated: int  # programs that several ranks have compiled


def started(kind: str, world: int) -> Start:
    with tempfile.TemporaryDirectory() as directory:
        run_ranks("tests.benchmarks.rank_start", world, kind, directory)
        ranks = [json.loads((Path(directory) / f"{each}.json").read_text()) for each in range(world)]
    times = Counter(key for each in ranks for key in each["keys"])
    return Start(
        max(each["seconds"] for each in ranks),
        sum(each["cpu_seconds"] for each in ranks),
        len(times),
        sum(count > 1 for count in times.values()),
    )


def rows(rounds: int = 8) -> list[Row]:
    starts: dict[tuple[str, int], list[Start]] = {("fsdp2", RANKS): [], ("fsdp2", 1): [], ("plain", 1): []}
    for _ in range(rounds):
        for (kind, world), found in starts.items():
            found.append(started(kind, world))
    many, one, plain = (Timing(tuple(each.seconds for each in found)) for found in starts.values())
    cpu = [min(each.cpu_seconds for each in found) for found in starts.values()]
    programs = [found[0].num_programs for found in starts.values()]
    return [
        Row(
            f"cold start of {RANKS} ranks / one rank",
            many.minimum / one.minimum,
            "<=",
            1.5,
            f"{many} / {one}; plain step of one process {plain}; {programs[0]} programs / {programs[1]}, "
            f"{programs[2]}; seconds of the CPU {cpu[0]:.1f} / {cpu[1]:.1f}, {cpu[2]:.1f}",
        ),
        Row(
            "programs compiled by more than one rank",
            max(each.num_repeated for each in starts["fsdp2", RANKS]),
            "==",
            0,
        ),
    ]


if __name__ == "__main__":
    if len(sys.argv) > 1:
        rank(sys.argv[1], Path(sys.argv[2]))
    else:
        sys.exit(not print_table(rows()))
