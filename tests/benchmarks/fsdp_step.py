"""FSDP2's step of the 5M Llama in a region, on 2 and on 4 processes of this machine's CPU.

`python -m tests.benchmarks.fsdp_step`.  The global batch is that of `llama_step`, each process has its rows.
Bar: at most 1.15 of the same step in pure JAX over the same processes, whichever of the two ways that JAX has
(`jax_sharded.py`) is faster.  Reported beside it: PyTorch's own FSDP2 on CPU tensors, with gloo; and the
host's time of a step, until it is dispatched.  All take turns in the same processes.
"""

import json
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.benchmarks import jax_reference, jax_sharded, torch_step
from tests.benchmarks.bars import Row, print_table
from tests.benchmarks.interleaved import Timing, interleave
from tests.benchmarks.rank_launch import run_ranks

WORLDS = 2, 4
CALLS = 3


class ShardedStep(torch_step.TrainingStep):
    """The step of `TrainingStep` by FSDP2 on this rank's rows; the loss is that of all ranks."""

    def __init__(self, model: nn.Module, device: str) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        rows = tuple(np.array_split(each, world)[rank] for each in torch_step.llama_batch())
        super().__init__(model, torch_step.llama_loss, rows, device)
        if device == "tpu":
            self.step = torch.tpu.spmd(self._step)

    def _placed(self, model: nn.Module, device: str) -> nn.Module:
        mesh = init_device_mesh(device, (dist.get_world_size(),))
        model = model.to(device)
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    def _step(self, *batch: Tensor) -> Tensor:
        loss = super()._step(*batch).clone()
        dist.all_reduce(loss, dist.ReduceOp.AVG)
        return loss


class RegionSteps(torch_step.DeviceSteps):
    """Steps in a region, with the host's seconds of each."""

    def __init__(self, step: ShardedStep) -> None:
        super().__init__(step, "fused")
        self.host_seconds: list[float] = []

    def dispatch(self) -> None:
        begin = time.perf_counter()
        self.loss = self.step()
        self.host_seconds.append(time.perf_counter() - begin)


def rank(rounds: int, result: Path) -> None:
    """What each process runs; the first one writes what it found."""
    dist.init_process_group("cpu:gloo,tpu:tpu")
    import jax  # one of many from here on

    assert jax.process_count() == jax.device_count() == dist.get_world_size()
    state = jax_reference.initial_state(torch_step.llama())
    loss, batch = jax_reference.llama_loss(torch_step.LLAMA), torch_step.llama_batch()
    region = RegionSteps(ShardedStep(torch_step.llama(), "tpu"))
    targets = {
        "region": region,
        "jax, mapped": jax_sharded.ShardedJaxSteps(state, jax_sharded.mapped, loss, batch),
        "jax, partitioned": jax_sharded.ShardedJaxSteps(state, jax_sharded.partitioned, loss, batch),
        "gloo": torch_step.NativeSteps(ShardedStep(torch_step.llama(), "cpu")),
    }
    timings = interleave(targets, calls=CALLS, rounds=rounds)
    assert len(region.step.step.digests) == 1  # the step is one program
    losses = {name: float(target.loss) for name, target in targets.items()}
    for value in losses.values():  # after equally many steps
        assert abs(value / losses["region"] - 1) < 1e-4, losses
    if dist.get_rank() == 0:
        found = {name: timing.seconds for name, timing in timings.items()}
        result.write_text(json.dumps(found | {"host": region.host_seconds[-CALLS * rounds :]}))
    dist.destroy_process_group()


def measured(world: int, rounds: int) -> dict[str, Timing]:
    """The seconds of a step by target, in `world` processes."""
    with tempfile.TemporaryDirectory() as directory:
        result = Path(directory) / "result.json"
        run_ranks("tests.benchmarks.fsdp_step", world, rounds, result)
        return {name: Timing(tuple(each)) for name, each in json.loads(result.read_text()).items()}


def rows(rounds: int = 7) -> list[Row]:
    found = []
    for world in WORLDS:
        of = measured(world, rounds)
        region, mapped, partitioned = of["region"], of["jax, mapped"], of["jax, partitioned"]
        found.append(
            Row(
                f"FSDP2 step, {world} processes / JAX",
                region.minimum / min(mapped.minimum, partitioned.minimum),
                "<=",
                1.15,
                f"{region} / shard_map {mapped}, partitioned {partitioned}; "
                f"PyTorch on CPU tensors {of['gloo']}; host {of['host']}",
            )
        )
    return found


if __name__ == "__main__":
    if len(sys.argv) > 1:
        rank(int(sys.argv[1]), Path(sys.argv[2]))
    else:
        sys.exit(not print_table(rows()))
