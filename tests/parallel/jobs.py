"""Runs of the Trainer that the ranks of one launch make, one after the other: a launch takes seconds."""

import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.backend.distributed.ranks import assert_all_ended_well, run_ranks

sys.path.insert(0, str(Path(__file__).parent))

import context_runs
import small_run
import tensor_models
from mounted_bucket import mounted_bucket

from tputrain import Trainer, rng
from tputrain.checkpoint import rows
from tputrain.errors import UserError
from tputrain.models.sequence import sequence_split
from tputrain.parallel import auto
from tputrain.parallel.config import ParallelConfig
from tputrain.parallel.world import Ranks


@dataclass(frozen=True)
class Job:
    """A run by its name, which is its directory's, too."""

    name: str
    model: str = "small"
    """small, recomputing, recomputing-but-products, without-logits: of `small_run`; llama, lora, qwen3,
    untied-qwen3: of `tensor_models`, also "llama without logits"; or of `context_runs`."""
    source: str = ""
    """The run from whose middle it goes on."""
    sequences: int = 4
    """Of a micro-batch."""
    parallel: dict[str, Any] = field(default_factory=dict)
    optim: dict[str, Any] = field(default_factory=dict)
    steps: int = 20
    every: int | str = 10
    """checkpoint.every."""
    is_auto: bool = False
    """Whether `parallel` is what parallel.auto is to find, by itself or by way of `order`."""
    order: list[int] | None = None
    """The ranks in the order of the mesh, for parallel.auto; None: that of their numbers."""
    is_in_bucket: bool = False
    """Whether its directory keeps of a file only what one rank has written."""


SCRIPT = """
    sys.path.insert(0, os.environ["HERE"])
    import jobs

    jobs.train_all(rank, world)
    assert not torch.tpu.fallback_stats(), torch.tpu.fallback_stats()
    dist.destroy_process_group()
"""


def launch(world_size: int, jobs: Sequence[Job], runs: Path) -> list[str]:
    """Have ranks do the jobs; returns what each said."""
    environment = {
        "GROUP_BACKEND": "cpu:gloo,tpu:tpu",
        "GROUP_TIMEOUT": "300",  # on a busy machine one rank compiles for minutes, and the others wait
        "HERE": str(Path(__file__).parent),
        "JOBS": json.dumps([asdict(job) for job in jobs]),
        "RUNS": str(runs),
    }
    ranks = run_ranks(SCRIPT, world_size, timeout=600, **environment)
    assert_all_ended_well(ranks)
    for rank in ranks:
        assert "While redistributing" not in rank.stderr, rank.stderr  # several gathers where one would do
    return [rank.stdout for rank in ranks]


def train_all(rank: int, world: int) -> None:
    """What a rank of the launch does."""
    runs = Path(os.environ["RUNS"])
    torch.tpu.set_executable_cache(runs / "programs")
    for each in json.loads(os.environ["JOBS"]):
        job = Job(**each)
        if job.source and rank == 0:
            small_run.begin_from(runs / job.source, runs / job.name)
        dist.barrier()
        # Each rank writes its rows of everything; or the first one all that is small.
        rows.SMALLEST_PART = 0 if world == 2 or "tensor" in job.parallel else 1 << 20
        began = time.perf_counter()
        with mounted_bucket(runs / job.name) if job.is_in_bucket else nullcontext([]) as written:
            _train(job, runs / job.name, rank, world)
        assert not any(name.endswith(".safetensors") for name in written), written
        print(f"{job.name}: {time.perf_counter() - began:.1f} s", flush=True)
    if world == 2:
        _check_shared(runs, rank)


def _train(job: Job, run_dir: Path, rank: int, world: int) -> None:
    degrees = {name: size for name, size in job.parallel.items() if name != "plan"}
    if job.model in context_runs.MODELS:
        trainer = context_runs.train(job.model, run_dir, "tpu", **job.parallel)
        assert (trainer.world.context_size, trainer.world.data_rank) == (2, rank)
        assert trainer.world.sequence is not None
        if "shard" not in job.parallel:  # else shards differ in size, and the step is a chain
            assert len(trainer.train_step._region.digests) == 1
        _check_refuses_other_models(trainer.world.sequence)
    else:
        model, layout = build(job.model), {"auto": True} if job.is_auto else job.parallel
        with pytest.MonkeyPatch.context() as patch:
            if job.order is not None:
                found = {"tensor": 1, "context": 1, **job.parallel}, job.order
                patch.setattr(auto, "_division", lambda *_: found)
            trainer = small_run.train(
                run_dir,
                "tpu",
                model,
                8 // job.sequences,
                job.sequences,
                job.optim,
                job.steps,
                job.every,
                **layout,
            )
    assert (trainer.world.size, trainer.world.rank) == (world, rank)
    assert trainer.world.keeps_rows == (not job.is_in_bucket)
    _check_random_numbers(trainer)
    tensor = degrees.get("tensor", 1)
    assert trainer.world.data_rank == (rank if job.order is None else job.order.index(rank)) // tensor
    assert trainer.world.data_size * tensor * degrees.get("context", 1) == world
    if tensor > 1:
        part = trainer.model.get_parameter("model.layers.0.self_attn.q_proj.weight")
        assert part.device_mesh.mesh_dim_names == ("replicate", "shard", "tensor")
        assert part.to_local().numel() == part.numel() / world * degrees.get("replicate", 1)
    else:
        if job.model == "small":
            _check_predictions_are_whole(trainer)
        parts = degrees.get("shard", 1) * degrees.get("context", 1)
        whole = sum(parameter.numel() for parameter in trainer.model.parameters())
        own = sum(parameter.to_local().numel() for parameter in trainer.model.parameters())
        assert own <= whole / parts * 1.1, (own, whole)


def _check_random_numbers(trainer: Trainer) -> None:
    """Ranks that have one part of a batch draw the same on their devices, and others do not."""
    states = trainer.world.of_all((trainer.world.data_rank, str(rng.capture(trainer.device)["device"])))
    assert len({state for _, state in states}) == len({part for part, _ in states}) == len(set(states))


def _check_predictions_are_whole(trainer: Trainer) -> None:
    (predicted,) = trainer.predict([small_run.batch(7, 2)])
    everywhere = trainer.world.of_all([value.tolist() for value in predicted.values()])
    assert predicted["logits"].shape == (2, 8, small_run.SHAPE.vocab_size)
    assert all(each == everywhere[0] for each in everywhere)


def build(name: str) -> Any:
    """The model of a run, of `small_run` or `tensor_models`."""
    if name == "small":
        return None  # its own
    of_small = {
        "recomputing": partial(small_run.recomputing, "layers"),
        "recomputing-but-products": partial(small_run.recomputing, "products"),
        "without-logits": small_run.without_logits,
    }
    if name in of_small:
        return of_small[name]()
    model = tensor_models.build(name.removesuffix(" without logits"))
    return small_run.without_logits(model) if name.endswith(" without logits") else model


def _check_refuses_other_models(sequence: Any) -> None:
    with (
        pytest.raises(UserError, match="attention sees only the part of a sequence"),
        sequence_split(sequence),
    ):
        torch.nn.Linear(2, 2)(torch.ones(1, 2))


def _check_shared(runs: Path, rank: int) -> None:
    """A directory of one rank alone is refused."""
    world = Ranks(ParallelConfig(shard=-1))
    own = runs / f"of-rank-{rank}"
    own.mkdir(exist_ok=True)
    world.check_shared(runs)
    with pytest.raises(UserError, match=r"rank 1 on .*expected a directory that all ranks share"):
        world.check_shared(own)
    assert not any(own.iterdir())
