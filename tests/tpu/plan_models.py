"""Models that are not our Llama, planned for a slice and judged by the TPU's compiler.

    python -m tests.tpu.plan_models [--topology v5e:4x4] [NAME ...]

Each model is planned, and the plan's step is compiled, in a process of its own: it stands for one rank of the
slice. Needs libtpu and no TPU; a model takes a few minutes. Prints a table in Markdown.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.backend.fresh_process import FailedProcessError, found_by
from tests.tpu.chips import compiler_is_installed
from tputrain.batches import Batch
from tputrain.cli.plan import subject_of, task_of
from tputrain.config import RunConfig, TrainerConfig
from tputrain.models import parameters_on_meta
from tputrain.models.vit import Vit, VitConfig
from tputrain.optim.config import AdamWConfig
from tputrain.parallel.candidate import Candidate, Task
from tputrain.parallel.config import ParallelConfig
from tputrain.parallel.dry_run import batch_like, workload_of
from tputrain.parallel.memory_model import Precision
from tputrain.parallel.plan import make_plan, refuse
from tputrain.parallel.topology import GIB, Topology
from tputrain.planning.compiled_step import Subject, start_slice
from tputrain.planning.judged import judge_by
from tputrain.recipe import read_recipe

RECIPES = Path(__file__).parent / "planned"


@dataclass(frozen=True)
class Planned:
    """One model: what is asked of a slice, and a candidate of its plan as the Trainer would run it."""

    task: Callable[[Topology], Task]
    subject: Callable[[Candidate], Subject]


# -- models of a recipe


def of_recipe(name: str) -> Planned:
    cfg = read_recipe(RECIPES / f"{name}.yaml", [])
    return Planned(lambda topology: task_of(cfg, topology), lambda candidate: subject_of(cfg, candidate))


# -- models that are given to the Trainer in Python, with a loader of their own


class Tower(nn.Module):
    """Ids of features to one vector of length 1."""

    def __init__(self, num_ids: int, num_features: int, width: int, hidden: int, depth: int, out: int):
        super().__init__()
        self.embed = nn.Embedding(num_ids, width)
        sizes = [num_features * width, *[hidden] * depth]
        self.layers = nn.ModuleList(nn.Linear(*pair) for pair in pairwise(sizes))
        self.out = nn.Linear(hidden, out)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed(ids).flatten(1)
        for layer in self.layers:
            hidden = F.relu(layer(hidden))
        return F.normalize(self.out(hidden).float(), dim=1)


class TwoTowers(nn.Module):
    """Users and what they took. The other rows of a batch are what a user did not take (in-batch softmax)."""

    def __init__(self) -> None:
        super().__init__()
        self.user = Tower(1_000_000, 32, 256, 8192, 8, 512)
        self.item = Tower(500_000, 16, 256, 8192, 8, 512)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        scores = self.user(user) @ self.item(item).T / 0.05
        return F.cross_entropy(scores, torch.arange(scores.shape[0], device=scores.device))


def towers_batch() -> dict[str, Tensor]:
    return {name: torch.zeros(2, n, dtype=torch.int64) for name, n in (("user", 32), ("item", 16))}


VIT_G = {
    "hidden_size": 1408,
    "intermediate_size": 6144,
    "num_hidden_layers": 40,
    "num_attention_heads": 16,
    "image_size": 224,
    "patch_size": 14,
}
"""ViT-g/14 (Zhai et al. 2022), a billion parameters."""


def vit() -> nn.Module:
    """Ours: 256 patches, and no biases."""
    return Vit(VitConfig(num_channels=3, num_classes=1000, **VIT_G))


def vit_of_transformers() -> nn.Module:
    """257 tokens, since it has one for the class; biases everywhere."""
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(ViTConfig(num_labels=1000, **VIT_G))


def vit_batch() -> dict[str, Tensor]:
    return {"pixel_values": torch.zeros(2, 3, 224, 224), "labels": torch.zeros(2, dtype=torch.int64)}


def of_module(make: Callable[[], nn.Module], example: Callable[[], Batch], rows: int) -> Planned:
    """`rows`: of a step. Computed in bfloat16 from float32 masters; no layers are computed again."""
    optim = AdamWConfig(master_weights=True)

    def model() -> nn.Module:
        with parameters_on_meta():
            return make()

    def task(topology: Topology) -> Task:
        workload = workload_of(model(), batch_like(example()), has_masters=True)
        return Task(workload, topology, rows, precision=Precision.of(optim, None), rungs=("none",))

    def subject(candidate: Candidate) -> Subject:
        degrees = candidate.layout.degrees
        cfg = RunConfig(
            trainer=TrainerConfig(accumulate=candidate.micro_batches),
            optim=optim,
            parallel=ParallelConfig(**degrees),
        )
        micro_rows = candidate.rows * degrees["replicate"] * degrees["shard"]
        batch = {name: each[:1].expand(micro_rows, *each.shape[1:]) for name, each in example().items()}
        return Subject(model, cfg, batch, candidate.layout)

    return Planned(task, subject)


MODELS: dict[str, Callable[[], Planned]] = {
    "two-towers": lambda: of_module(TwoTowers, towers_batch, 65_536),
    "vit": lambda: of_module(vit, vit_batch, 512),
    "vit-transformers": lambda: of_module(vit_of_transformers, vit_batch, 512),
    "qwen3": lambda: of_recipe("qwen3"),
    "experts": lambda: of_recipe("experts"),
}


def judged(name: str, topology: Topology, compiles: bool) -> dict[str, Any]:
    """The plan, and the compiler's figures of it."""
    if compiles:
        start_slice(topology)
    planned = MODELS[name]()
    task = planned.task(topology)
    plan = make_plan(task)
    refuse(plan)
    chosen = plan.chosen
    assert chosen is not None
    assert chosen.memory is not None
    assert chosen.seconds is not None
    found: dict[str, Any] = {"parameters": task.workload.num_parameters, **chosen.as_json(task)}
    found |= {"planned_gib": chosen.memory.total / GIB, "planned_seconds": chosen.seconds.total}
    if compiles:
        by_compiler = judge_by(planned.subject, task)(chosen)
        step = by_compiler.step
        if step is None:
            raise RuntimeError(by_compiler.problem)
        degrees = chosen.layout.degrees
        ranks = degrees["replicate"] * degrees["shard"] * chosen.micro_batches
        flops = ranks * task.workload.model_flops(chosen.rows) / topology.num_devices
        found |= {"compiled_gib": step.memory / GIB, "compiled_seconds": step.seconds}
        found |= {"arguments_gib": step.arguments / GIB, "compile_seconds": step.compile_seconds}
        found |= {"compiled_mfu": flops / step.seconds / topology.peak_flops, "depth": step.depth}
    return found


HEADER = (
    "| model | parameters | degrees | checkpointing | rows x micro-batches | planner GiB | compiler GiB "
    "| planner / compiler | planner ms | compiler ms | planner MFU | compiler MFU | compile s |"
)


def row(name: str, found: dict[str, Any]) -> str:
    """Of the table."""
    degrees = " ".join(f"{axis} {degree}" for axis, degree in found["degrees"].items() if degree > 1)
    cells = [
        name,
        f"{found['parameters'] / 1e9:.2f}B",
        degrees,
        found["activation_checkpointing"],
        f"{found['rows']} x {found['micro_batches']}",
        f"{found['planned_gib']:.2f}",
        f"{found['compiled_gib']:.2f}",
        f"{found['planned_gib'] / found['compiled_gib']:.3f}",
        f"{found['planned_seconds'] * 1e3:.4g}",
        f"{found['compiled_seconds'] * 1e3:.4g}",
        f"{found['mfu']:.1%}",
        f"{found['compiled_mfu']:.1%}",
        f"{found['compile_seconds']:.0f}",
    ]
    return f"| {' | '.join(cells)} |"


def in_a_process(name: str, topology: str) -> dict[str, Any] | str:
    """What `judged` gives, or in a line why it gives nothing."""
    try:
        return found_by("tests.tpu.plan_models", "--alone", "--topology", topology, name)
    except FailedProcessError as error:
        return str(error)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="models of the list; all unless given")
    parser.add_argument("--topology", default="v5e:4x4")
    parser.add_argument("--alone", action="store_true", help="one model in this process; prints JSON")
    parser.add_argument("--plan-only", action="store_true", help="with --alone: nothing is compiled")
    options = parser.parse_args()
    if unknown := set(options.names) - MODELS.keys():
        parser.error(f"no such model: {', '.join(sorted(unknown))}; there is {', '.join(MODELS)}")
    if not compiler_is_installed():
        parser.error("the TPU compiler is not installed: pip install libtpu (Linux, x86-64)")
    if options.alone:
        found = judged(options.names[0], Topology.parse(options.topology), not options.plan_only)
        print(json.dumps(found))
        return 0
    num_failed = 0
    print(HEADER, "|---" * HEADER.count(" |") + "|", sep="\n", flush=True)
    for name in options.names or MODELS:
        found = in_a_process(name, options.topology)
        num_failed += isinstance(found, str)
        print(f"| {name} | {found} |" if isinstance(found, str) else row(name, found), flush=True)
    return int(num_failed > 0)


if __name__ == "__main__":
    sys.exit(main())
