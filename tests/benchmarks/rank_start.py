"""The cold start of four ranks on this machine's CPU against that of one process, of the 5M Llama.

`python -m tests.benchmarks.rank_start`. From the first operation (the model goes to the device) to the end of
the first training step, with nothing on disk. Both train on the same global batch, the ranks by FSDP2 in a
region. Bars: the slowest of four ranks takes at most 1.5 times as long as the one process; and no program is
compiled twice. The two take turns, each in fresh processes, after imports and the start of the group.
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


def rank(directory: Path) -> None:
    """What each process runs; it writes what it found to a file of its own."""
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
    keys.clear()
    began, cpu_began = time.perf_counter(), time.process_time()
    if dist.get_world_size() == 1:
        batch = torch_step.llama_batch()
        step = torch_step.TrainingStep(torch_step.llama(), torch_step.llama_loss, batch, "tpu")
        step.step = torch.tpu.spmd(step._step)
    else:
        step = ShardedStep("tpu")
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


def started(world: int) -> Start:
    with tempfile.TemporaryDirectory() as directory:
        run_ranks("tests.benchmarks.rank_start", world, directory)
        ranks = [json.loads((Path(directory) / f"{each}.json").read_text()) for each in range(world)]
    times = Counter(key for each in ranks for key in each["keys"])
    return Start(
        max(each["seconds"] for each in ranks),
        sum(each["cpu_seconds"] for each in ranks),
        len(times),
        sum(count > 1 for count in times.values()),
    )


def rows(rounds: int = 5) -> list[Row]:
    of_one, of_many = [], []
    for _ in range(rounds):
        of_one.append(started(1))
        of_many.append(started(RANKS))
    one, many = (Timing(tuple(each.seconds for each in starts)) for starts in (of_one, of_many))
    cpu = [min(each.cpu_seconds for each in starts) for starts in (of_many, of_one)]
    programs = f"{of_many[0].num_programs} programs / {of_one[0].num_programs}"
    return [
        Row(
            f"cold start of {RANKS} ranks / one process",
            many.minimum / one.minimum,
            "<=",
            1.5,
            f"{many} / {one}; {programs}; seconds of the CPU {cpu[0]:.1f} / {cpu[1]:.1f}",
        ),
        Row("programs compiled by more than one rank", max(each.num_repeated for each in of_many), "==", 0),
    ]


if __name__ == "__main__":
    if len(sys.argv) > 1:
        rank(Path(sys.argv[1]))
    else:
        sys.exit(not print_table(rows()))
