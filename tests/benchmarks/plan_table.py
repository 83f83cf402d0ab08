"""Our step beside one written by hand in JAX, both compiled for TPUs that are not here.

    python -m tests.benchmarks.plan_table --rows one-chip 1b-v5e

Each side of a row is compiled in a process of its own, with the same model, mesh, rows a chip and activation
checkpointing. Needs libtpu and no TPU; the larger rows take a quarter of an hour a side.
"""

from __future__ import annotations

import argparse
import json
import resource
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import jax
import torch
from torch import Tensor

from tests.backend.fresh_process import FailedProcessError, found_by
from tests.benchmarks import jax_slice
from tpu_backend import ahead_of_time
from tpu_backend.runtime.compiler_options import wanted_for
from tputrain.config import RunConfig, TrainerConfig
from tputrain.execution import ExecutionConfig
from tputrain.models import parameters_on_meta
from tputrain.models.llama import LLAMA_CONFIGS, Llama, LlamaConfig
from tputrain.optim.config import AdamWConfig
from tputrain.parallel.candidate import Candidate, Task, modelled
from tputrain.parallel.config import ParallelConfig
from tputrain.parallel.cost_model import CostModel
from tputrain.parallel.dry_run import workload_of
from tputrain.parallel.memory_model import Precision
from tputrain.parallel.topology import GIB, Topology
from tputrain.parallel.workload import Workload
from tputrain.planning.compiled_step import Subject, compile_step, start_slice

Lower = Callable[[jax_slice.SliceStep], jax.stages.Lowered]


@dataclass(frozen=True)
class Row:
    """What both sides compile."""

    model: str
    topology: str
    rows: int
    """Sequences a chip."""
    sequence: int
    recomputes: bool
    layers: int | None = None
    """None: the model's own number."""
    weights: str = "float32"
    """The dtype of the optimizer's state, and of the weights that it steps. All else is in bfloat16: ours has
    bfloat16 copies of float32 weights (`optim.master_weights`), JAX converts them in each step.
    """
    replicas: int = 1

    @property
    def config(self) -> LlamaConfig:
        found = replace(LLAMA_CONFIGS[self.model], activation_checkpointing=self.recomputes)
        return found if self.layers is None else replace(found, num_hidden_layers=self.layers)


ROWS = {
    "one-chip": Row("llama-100m", "v6e:1x1", 4, 1024, False, 4, "bfloat16"),
    "one-chip-8k": Row("llama-100m", "v6e:1x1", 1, 8192, False, 2, "bfloat16"),
    "one-chip-16k": Row("llama-100m", "v6e:1x1", 1, 16_384, False, 2, "bfloat16"),
    "one-chip-32k": Row("llama-100m", "v6e:1x1", 1, 32_768, False, 2, "bfloat16"),
    "1b-v5e": Row("llama-1b", "v5e:2x2", 1, 2048, True),
    "1b-v6e": Row("llama-1b", "v6e:2x2", 1, 2048, True),
    "8b-v5e": Row("llama-8b", "v5e:16x16", 1, 2048, True),
    "8b-v5p": Row("llama-8b", "v5p:4x4x4", 2, 2048, True),
    "8b-v6e": Row("llama-8b", "v6e:16x16", 2, 2048, True),
    "8b-v6e-8k": Row("llama-8b", "v6e:16x16", 3, 8192, True),
    "8b-4096": Row("llama-8b", "v5p:16x16x16", 1, 2048, True),
    "8b-4096-replicas": Row("llama-8b", "v5p:16x16x16", 1, 2048, True, replicas=16),
    "70b-v5p": Row("llama-70b", "v5p:8x8x8", 1, 2048, True),
    "70b-v6e": Row("llama-70b", "v6e:16x16", 1, 2048, True),
    "405b-v5p": Row("llama-405b", "v5p:8x8x8", 1, 2048, True),
}


def ours(row: Row, under_autocast: bool = False, is_whole: bool = False) -> dict[str, float]:
    """Our Trainer's step. In a process of its own: it stands for a rank of the slice."""
    topology = Topology.parse(row.topology)
    start_slice(topology)
    layout = jax_slice.layout_of(row.topology, row.replicas)
    cfg = RunConfig(
        trainer=TrainerConfig(accumulate=1),
        optim=AdamWConfig(master_weights=row.weights == "float32" and not under_autocast),
        execution=ExecutionConfig(autocast="bfloat16" if under_autocast else None),
        parallel=ParallelConfig(replicate=row.replicas, shard=topology.num_devices // row.replicas),
    )

    def model() -> Llama:
        with parameters_on_meta():
            return Llama(row.config).to(getattr(torch, row.weights))

    task, candidate = _plan(row)
    subject = Subject(
        model,
        cfg,
        _batch(row, row.rows * topology.num_devices),
        layout,
    )
    found = compile_step(subject, None if is_whole else partial(modelled, task, candidate))
    return {
        "compile_seconds": found.compile_seconds,
        "arguments": found.arguments,
        "temporaries": found.temporaries,
        "seconds": found.seconds,
    }


def autocast(row: Row) -> dict[str, float]:
    """Ours with float32 weights under autocast: what is between products is in float32, too."""
    return ours(row, under_autocast=True)


def whole(row: Row) -> dict[str, float]:
    """Ours with all layers compiled, and not 4 of them."""
    return ours(row, is_whole=True)


def _batch(row: Row, rows: int) -> dict[str, Tensor]:
    """In memory for one token."""
    one = torch.zeros(1, 1, dtype=torch.int64)
    return {name: one.expand(rows, row.sequence) for name in ("input_ids", "labels")}


def by_hand(row: Row, lower: Lower = jax_slice.lower, has_kernel: bool = False) -> dict[str, float]:
    """A step of `jax_slice`, with the options that ours has."""
    step = jax_slice.SliceStep(
        row.config,
        row.topology,
        row.rows,
        row.sequence,
        row.recomputes,
        has_kernel,
        row.weights,
        replicas=row.replicas,
    )
    chips = ahead_of_time.chips(row.topology)
    options = wanted_for(chips[0].device_kind, len(chips))
    found = jax_slice.compiled(step, options, lower=lower)
    return {
        "compile_seconds": found.compile_seconds,
        "arguments": found.arguments,
        "temporaries": found.temporaries,
        "seconds": found.schedule.total,
    }


def with_kernels(row: Row) -> dict[str, float]:
    """The same with JAX's splash attention, as an expert would have it."""
    return by_hand(row, has_kernel=True)


def unrolled(row: Row) -> dict[str, float]:
    """The other one, for one chip."""
    return by_hand(row, jax_slice.lower_unrolled)


def planned(row: Row) -> dict[str, float]:
    """What the models say, without a compiler; and the FLOPs of a chip in a step."""
    task, candidate = _plan(row)
    size = modelled(task, candidate).memory
    seconds = CostModel(task.workload, task.topology, task.precision).seconds(
        candidate.layout, row.rows, 1, candidate.rung
    )
    return {"memory": size.total, "seconds": seconds.total, "flops": task.workload.model_flops(row.rows)}


def _plan(row: Row) -> tuple[Task, Candidate]:
    """The row as the planner has it."""
    topology = Topology.parse(row.topology)
    precision = Precision.of(AdamWConfig(master_weights=row.weights == "float32"), None)
    task = Task(_workload(row), topology, row.rows * topology.num_devices, precision=precision)
    rung = "layers" if row.recomputes else "none"
    return task, Candidate(jax_slice.layout_of(row.topology, row.replicas), rung, row.rows, 1, "chosen", "")


def _workload(row: Row) -> Workload:
    def batch(rows: int) -> dict[str, Tensor]:
        size = (rows, row.sequence)
        return {name: torch.empty(size, dtype=torch.int64, device="meta") for name in ("input_ids", "labels")}

    with torch.device("meta"):
        model = Llama(replace(row.config, activation_checkpointing=False)).to(getattr(torch, row.weights))
    return workload_of(model, batch, name=row.model, has_masters=row.weights == "float32")


SIDES = {
    "ours": ours,
    "ours-autocast": autocast,
    "ours-whole": whole,
    "jax": by_hand,
    "jax-kernels": with_kernels,
    "jax-unrolled": unrolled,
}


def sides(row: Row) -> list[str]:
    is_one = Topology.parse(row.topology).num_devices == 1
    is_there = {
        "jax-unrolled": is_one and not row.recomputes,
        "ours-autocast": row.weights == "float32",
        "ours-whole": False,  # a quarter of an hour, and more where there are more layers
    }
    return [each for each in SIDES if is_there.get(each, True)]


def compiled(name: str, side: str) -> dict[str, float] | str:
    """One side of a row, or in a line why there is none."""
    try:
        return found_by("tests.benchmarks.plan_table", "--rows", name, "--side", side)
    except FailedProcessError as error:
        return str(error)


def table(names: list[str]) -> list[str]:
    """In Markdown: seconds to compile and memory of this machine, and predictions for a chip."""
    lines = [
        "| row | side | compile s | RSS GiB | arguments GiB | temporaries GiB | step ms | MFU |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in names:
        row, plan = ROWS[name], planned(ROWS[name])
        peak = Topology.parse(row.topology).peak_flops
        lines.append(
            f"| {name} | planner | | | {plan['memory'] / GIB:.2f} in all | | {plan['seconds'] * 1e3:.4g} | "
            f"{plan['flops'] / plan['seconds'] / peak:.1%} |"
        )
        found = {side: compiled(name, side) for side in sides(row)}
        for side, each in found.items():
            if isinstance(each, str):
                lines.append(f"| {name} | {side} | {each} | | | | | |")
                continue
            lines.append(
                f"| {name} | {side} | {each['compile_seconds']:.0f} | {each['resident']:.1f} | "
                f"{each['arguments'] / GIB:.2f} | {each['temporaries'] / GIB:.2f} | "
                f"{each['seconds'] * 1e3:.4g} | {plan['flops'] / each['seconds'] / peak:.1%} |"
            )
        mine = found["ours"]
        others = [
            each for side, each in found.items() if side.startswith("jax") and not isinstance(each, str)
        ]
        if not isinstance(mine, str) and others:
            size = _memory(mine) / min(map(_memory, others))
            seconds = mine["seconds"] / min(each["seconds"] for each in others)
            lines.append(f"| {name} | ours / JAX | | | memory {size:.3f} | | {seconds:.3f} | |")
    return lines


def _memory(found: dict[str, float]) -> float:
    return found["arguments"] + found["temporaries"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", nargs="+", choices=sorted(ROWS), default=list(ROWS))
    parser.add_argument("--side", choices=sorted(SIDES), help="one side of one row, as JSON")
    given = parser.parse_args()
    if given.side is None:
        print("\n".join(table(given.rows)))
        return
    found = SIDES[given.side](ROWS[given.rows[0]])
    found["resident"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(json.dumps(found))


if __name__ == "__main__":
    main()
