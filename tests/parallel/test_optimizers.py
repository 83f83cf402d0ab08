"""Every optimizer, and what goes along with one, trains, saves and goes on over ranks as in one process."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.backend.distributed.ranks import assert_all_ended_well, run_ranks
from tputrain.checkpoint.tensor_files import TensorFiles, has_tensors

sys.path.insert(0, str(Path(__file__).parent))

import optimizer_runs
from optimizer_runs import BAD, MIDDLE, STEPS, WAYS

SCRIPT = """
    sys.path.insert(0, os.environ["HERE"])
    from pathlib import Path
    import optimizer_runs
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor
    from tputrain.checkpoint import rows
    from tputrain.optim.orthogonal import orthogonalised

    mesh = init_device_mesh("tpu", (2,))
    generator = torch.Generator().manual_seed(0)
    # More matrices than there are ranks, a last row of one, and one that is whole on each rank.
    shapes = [(6, 4), (6, 4), (4, 6), (6, 4), (4, 6), (7, 3)]
    whole = [torch.randn(shape, generator=generator).to("tpu") for shape in shapes]
    divided = [distribute_tensor(each, mesh, [Shard(0)]) for each in whole[:-1]]
    found = orthogonalised([*divided, whole[-1]], (3.4445, -4.775, 2.0315), 5, 1e-7)
    for matrix, expected in zip(found, orthogonalised(whole, (3.4445, -4.775, 2.0315), 5, 1e-7), strict=True):
        assert type(matrix) is type(expected) or matrix.placements == (Shard(0),)
        found = matrix.full_tensor() if hasattr(matrix, "full_tensor") else matrix
        assert torch.equal(found, expected)

    rows.SMALLEST_PART = 0  # each rank writes its rows of everything
    runs = Path(os.environ["RUNS"])
    torch.tpu.set_executable_cache(runs / "programs")
    for name, way in optimizer_runs.WAYS.items():
        trainer = optimizer_runs.train(way, runs / name, "tpu", shard=2)
        assert trainer.world.size == world == 2 and trainer.world.rank == rank
        for p in trainer.model.parameters():
            dim = p.placements[1].dim
            assert p.to_local().shape[dim] == (p.shape[dim] + 1 - rank) // 2  # the first rank has more
        assert sum(p.placements[1].dim for p in trainer.model.parameters()) == (2 if way.parallel else 0)
        if rank == 0:
            optimizer_runs.begin_from_middle(runs / name, runs / f"{name}-again")
        dist.barrier()
        optimizer_runs.train(way, runs / f"{name}-again", "tpu", shard=2)
        if way.execution == "compile":  # one entry of the region a block
            assert torch._dynamo.utils.counters["frames"]["ok"] >= len(trainer.model.blocks)
            assert not torch._dynamo.utils.counters["graph_break"]
    assert not torch.tpu.fallback_stats(), torch.tpu.fallback_stats()
    dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """By way a run of two ranks, and one that went on from its middle (-again)."""
    directory = tmp_path_factory.mktemp("runs")
    environment = {
        "GROUP_BACKEND": "cpu:gloo,tpu:tpu",
        "HERE": str(Path(__file__).parent),
    }
    assert_all_ended_well(run_ranks(SCRIPT, 2, timeout=600, RUNS=str(directory), **environment))
    return directory


def records(run: Path, file: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / f"{file}.jsonl").read_text().splitlines()]


def assert_alike(expected_run: Path, run: Path) -> None:
    for file, keys in (("metrics", ("loss", "grad_norm")), ("evaluations", ("loss",))):
        expected, found = records(expected_run, file), records(run, file)
        assert [each["step"] for each in found] == [each["step"] for each in expected]
        for key in keys:
            values = [[each[key] for each in of if each[key] is not None] for of in (expected, found)]
            assert values[1] == pytest.approx(values[0], rel=1e-5), (file, key)
            assert len(values[0]) >= len(expected) - 1


def saved(run: Path) -> Iterator[tuple[str, torch.Tensor]]:
    checkpoint = run / "checkpoints" / f"step-{STEPS}"
    for stem in ("model", "trained", "optimizer"):
        if has_tensors(checkpoint, stem):
            files = TensorFiles(checkpoint, stem)
            yield from ((f"{stem}: {name}", files.read(name)) for name in files.names())


@pytest.mark.parametrize("name", WAYS)
def test_two_ranks_train_and_save_as_one_process_which_goes_on_from_them(runs: Path, name: str) -> None:
    way = WAYS[name]
    # Micro-batches are what the ranks have, so that gradients in bfloat16 are rounded alike.
    accumulate = 2 if name == "masters" else 1
    optimizer_runs.train(way, runs / f"{name}-alone", way.device, accumulate)
    assert_alike(runs / f"{name}-alone", runs / name)
    expected, found = (dict(saved(runs / each)) for each in (f"{name}-alone", name))
    assert found.keys() == expected.keys()
    # Muon's iteration is in bfloat16: another last digit of a gradient is at times another number there.
    atol = 1e-4 if name == "muon" else 1e-6
    for tensor, values in expected.items():
        torch.testing.assert_close(
            found[tensor], values, rtol=1e-4, atol=atol, msg=lambda told, tensor=tensor: f"{tensor}: {told}"
        )
    optimizer_runs.begin_from_middle(runs / name, runs / f"{name}-from-2-to-1")
    optimizer_runs.train(way, runs / f"{name}-from-2-to-1", way.device, accumulate)
    assert_alike(runs / f"{name}-alone", runs / f"{name}-from-2-to-1")


@pytest.mark.parametrize("name", WAYS)
def test_a_run_that_goes_on_has_the_same_bits(runs: Path, name: str) -> None:
    expected, found = (records(runs / each, "metrics") for each in (name, f"{name}-again"))
    assert [each["loss_hex"] for each in found] == [each["loss_hex"] for each in expected]
    expected, found = (dict(saved(runs / each)) for each in (name, f"{name}-again"))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[tensor], values) for tensor, values in expected.items())


def test_a_bad_step_on_one_rank_is_no_step_on_any(runs: Path) -> None:
    for name in ("skip", "rollback"):
        (bad,) = [each["step"] for each in records(runs / name, "metrics") if each["loss"] is None]
        assert bad == BAD
        assert (runs / name / "nonfinite" / f"step-{BAD}" / "batch-0.safetensors").is_file()
    # It can go back from the first step on, to a checkpoint.
    steps = sorted(path.name for path in (runs / "rollback" / "checkpoints").iterdir())
    assert steps == ["step-0", f"step-{MIDDLE}", f"step-{STEPS}"]
