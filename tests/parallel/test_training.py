"""A Trainer on several ranks trains, evaluates and saves as one process does, and each loads the other's."""

import json
import sys
from pathlib import Path

import pytest

from tests.backend.distributed.ranks import Rank, assert_all_ended_well, run_ranks

sys.path.insert(0, str(Path(__file__).parent))

import small_run

SCRIPT = """
    sys.path.insert(0, os.environ["HERE"])
    from pathlib import Path
    import small_run
    from tputrain.checkpoint import rows
    from tputrain.parallel import auto
    from tputrain.errors import UserError

    if world == 2:
        rows.SMALLEST_PART = 0  # each rank writes its rows of everything
    runs = Path(os.environ["RUNS"])
    for job in os.environ["JOBS"].split():
        name, source, replicate, shard, *sequences = job.split(":")
        sequences = int(*sequences or "4")
        if source and rank == 0:
            small_run.begin_from(runs / source, runs / name)
        dist.barrier()
        layout = {"replicate": int(replicate), "shard": int(shard)}
        if name in ("auto", "both"):
            layout, degrees = {"auto": True}, {"tensor": 1, "context": 1, **layout}
        if name == "both":  # shards are not the ranks that follow each other, as where a ring is that way
            auto._division = lambda *_: (degrees, [0, 2, 1, 3])
        model = small_run.recomputing() if name == "recomputed" else None
        trainer = small_run.train(runs / name, "tpu", model, 8 // sequences, sequences, **layout)
        assert trainer.world.size == world and trainer.world.rank == rank
        assert trainer.world.data_size == world
        assert trainer.world.data_rank == ([0, 2, 1, 3].index(rank) if name == "both" else rank)
        if int(shard) > 1:
            whole = sum(p.numel() for p in trainer.model.parameters())
            own = sum(p.to_local().numel() for p in trainer.model.parameters())
            assert own <= whole / int(shard) * 1.1, (own, whole)
    assert not torch.tpu.fallback_stats()
    (predicted,) = trainer.predict([small_run.batch(7, 2)])  # all of it on each rank
    everywhere = trainer.world.of_all([value.tolist() for value in predicted.values()])
    assert predicted["logits"].shape == (2, 8, small_run.SHAPE.vocab_size)
    assert all(each == everywhere[0] for each in everywhere)

    own = runs / f"of-rank-{rank}"
    own.mkdir(exist_ok=True)
    trainer.world.check_shared(runs)
    try:
        trainer.world.check_shared(own)
        raise AssertionError("a directory of one rank alone was taken")
    except UserError as error:
        assert "rank 1 on" in str(error) and "expected a directory that all ranks share" in str(error)
    assert not any(own.iterdir())
    dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with `alone`, the run of one process on PyTorch's own kernels."""
    directory = tmp_path_factory.mktemp("runs")
    small_run.train(directory / "alone", "cpu")
    return directory


def run_jobs(world_size: int, jobs: str, runs: Path) -> list[Rank]:
    here = str(Path(__file__).parent)
    environment = {"GROUP_BACKEND": "cpu:gloo,tpu:tpu", "TPU_CACHE_DIR": str(runs / "programs")}
    ranks = run_ranks(SCRIPT, world_size, timeout=300, JOBS=jobs, RUNS=str(runs), HERE=here, **environment)
    assert_all_ended_well(ranks)
    return ranks


def assert_as_alone(runs: Path, name: str) -> None:
    for file, keys in (("metrics", ("loss", "grad_norm")), ("evaluations", ("loss", "accuracy"))):
        expected, found = ((runs / each / f"{file}.jsonl").read_text() for each in ("alone", name))
        expected, found = ([json.loads(line) for line in text.splitlines()] for text in (expected, found))
        assert [each["step"] for each in found] == [each["step"] for each in expected]
        for key in keys:
            assert [each[key] for each in found] == pytest.approx([each[key] for each in expected], rel=1e-5)


def flops_of_steps(runs: Path, name: str, chips: int) -> list[float]:
    records = map(json.loads, (runs / name / "metrics.jsonl").read_text().splitlines())
    return [each["mfu"] * each["step_seconds"] * 1e9 * chips for each in records]


def bits(runs: Path, name: str) -> list[str]:
    lines = (runs / name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss_hex"] for line in lines]


def test_two_and_four_ranks_train_as_one_process_and_go_on_from_each_others_checkpoints(runs: Path):
    jobs = "shard::1:2 replicate::2:1 from-1-to-2:alone:1:2 again:shard:1:2 recomputed::1:2 auto::1:2"
    first, second = run_jobs(2, jobs, runs)
    assert first.stdout.count("x 2, a line: shard 2") == 1  # the plan's picture
    assert "a line" not in second.stdout
    run_jobs(4, "both::2:2:8 from-2-to-4:shard:2:2:8", runs)  # in larger micro-batches
    for source, name, sequences in (("shard", "from-2-to-1", 4), ("both", "from-4-to-1", 2)):
        small_run.begin_from(runs / source, runs / name)
        small_run.train(runs / name, "cpu", None, 8 // sequences, sequences)
    names = ("shard", "replicate", "both", "from-1-to-2", "from-2-to-4", "from-2-to-1", "from-4-to-1")
    for name in (*names, "recomputed", "auto"):
        assert_as_alone(runs, name)
    assert bits(runs, "again") == bits(runs, "shard")
    assert flops_of_steps(runs, "both", chips=4) == pytest.approx(flops_of_steps(runs, "alone", chips=1))
    last = json.loads((runs / "both" / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["slowest_rank"] in range(4)
    assert last["slowest_rank_seconds"] > 0

    for name, world, num_parts in (("alone", 1, 2), ("shard", 2, 2), ("both", 4, 1)):
        for record in map(json.loads, (runs / name / "metrics.jsonl").read_text().splitlines()):
            assert record["part_of_loss"] * num_parts == pytest.approx(record["loss"], rel=1e-5)
            assert record["mean_rank"] == (world - 1) / 2  # over all ranks
            assert record["of_first"] == 1


@pytest.mark.sweep
def test_from_four_ranks_a_run_goes_on_at_eight_and_at_two(runs: Path):
    run_jobs(4, "four::1:4", runs)
    run_jobs(8, "from-4-to-8:four:2:4:8", runs)
    run_jobs(2, "from-4-to-2:four:1:2 from-8-to-2:from-4-to-8:1:2:2", runs)
    for name in ("four", "from-4-to-8", "from-4-to-2", "from-8-to-2"):
        assert_as_alone(runs, name)
