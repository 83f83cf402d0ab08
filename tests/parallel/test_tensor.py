"""Tensor parallelism trains and saves as one process does: our Llama and a model of transformers."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from torch import nn

from tests.backend.distributed.ranks import assert_all_ended_well, run_ranks

sys.path.insert(0, str(Path(__file__).parent))

import small_run
import tensor_models

from tputrain.errors import UserError
from tputrain.models.llama import Llama
from tputrain.parallel.tensor_plan import parallelise_layers

SCRIPT = """
    sys.path.insert(0, os.environ["HERE"])
    from pathlib import Path
    import small_run
    import tensor_models
    from tputrain.checkpoint import rows

    rows.SMALLEST_PART = 0  # each rank writes its rows of everything
    runs = Path(os.environ["RUNS"])
    for job in os.environ["JOBS"].split():
        name, model, source, shard, *plan = job.split(":")
        if source and rank == 0:
            small_run.begin_from(runs / source, runs / name)
        dist.barrier()
        plan = {"plan": tensor_models.SEQUENCE_PLAN} if plan else {}
        model = tensor_models.build(model)
        matrix = model.model.layers[0].self_attn.q_proj.weight.numel()
        trainer = small_run.train(runs / name, "tpu", model, 1, tensor=2, shard=int(shard), **plan)
        assert trainer.world.size == world == 2 * int(shard) and trainer.world.data_size == int(shard)
        part = model.model.layers[0].self_attn.q_proj.weight
        assert part.to_local().numel() == matrix / world
        assert part.device_mesh.mesh_dim_names == ("replicate", "shard", "tensor")
    assert not torch.tpu.fallback_stats()
    dist.destroy_process_group()
"""


def run_jobs(world_size: int, jobs: str, runs: Path) -> str:
    here = str(Path(__file__).parent)
    environment = {"GROUP_BACKEND": "cpu:gloo,tpu:tpu", "TPU_CACHE_DIR": str(runs / "programs")}
    ranks = run_ranks(SCRIPT, world_size, timeout=300, JOBS=jobs, RUNS=str(runs), HERE=here, **environment)
    assert_all_ended_well(ranks)
    for rank in ranks:
        assert "While redistributing" not in rank.stderr, rank.stderr
    return ranks[0].stdout


def assert_alike(runs: Path, expected_name: str, name: str) -> None:
    for file, keys in (("metrics", ("loss", "grad_norm")), ("evaluations", ("loss", "accuracy"))):
        expected, found = ((runs / each / f"{file}.jsonl").read_text() for each in (expected_name, name))
        expected, found = ([json.loads(line) for line in text.splitlines()] for text in (expected, found))
        assert [each["step"] for each in found] == [each["step"] for each in expected]
        for key in keys:
            assert [each[key] for each in found] == pytest.approx([each[key] for each in expected], rel=1e-5)


def go_on_alone(runs: Path, model: str, name: str) -> None:
    small_run.begin_from(runs / name, runs / f"{name}-1")
    small_run.train(runs / f"{name}-1", "cpu", tensor_models.build(model), 1)


def test_ranks_that_share_layers_train_as_one_process_and_their_checkpoints_go_on_at_any_number(
    tmp_path: Path,
):
    for name in ("llama", "qwen3"):
        small_run.train(tmp_path / name, "cpu", tensor_models.build(name), 1)
    run_jobs(2, "llama-2:llama::1:sequence", tmp_path)
    go_on_alone(tmp_path, "llama", "llama-2")
    said = run_jobs(4, "llama-2-1-4:llama:llama-2-1:2 qwen3-4:qwen3::2", tmp_path)
    assert "whole on each tensor rank" in said
    assert "model.layers.*.input_layernorm.weight" in said
    go_on_alone(tmp_path, "qwen3", "qwen3-4")
    for name in ("llama-2", "llama-2-1", "llama-2-1-4"):
        assert_alike(tmp_path, "llama", name)
    for name in ("qwen3-4", "qwen3-4-1"):
        assert_alike(tmp_path, "qwen3", name)


@pytest.mark.parametrize(
    ("model", "plan", "degree", "message"),
    [
        (nn.Linear(2, 2), {}, 2, "parallel.tensor=2: Linear has no plan .*: expected an attribute tp_plan"),
        (
            Llama(replace(tensor_models.SHAPE, num_key_value_heads=1)),
            {},
            2,
            r"parallel.tensor=2: model.layers.0.self_attn.k_proj has 1 head of 6: expected .* 2 divides",
        ),
        (Llama(tensor_models.SHAPE), {"lm_head": "colwise"}, 4, "lm_head has 62 outputs: expected a number"),
        (Llama(tensor_models.SHAPE), {"*.norm": "rowwise"}, 2, "model.norm is a RMSNorm: expected a Linear"),
    ],
)
def test_a_model_that_cannot_be_cut_is_refused_in_one_line(
    model: nn.Module, plan: dict[str, Any], degree: int, message: str
):
    with pytest.raises(UserError, match=message) as caught:
        parallelise_layers(model, cast(Any, SimpleNamespace(size=lambda: degree)), plan)
    assert "\n" not in str(caught.value)
