"""A Trainer on several ranks trains, evaluates and saves as one process does, and each loads the other's."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import context_runs
import small_run
import tensor_models
from jobs import Job, launch

from tputrain.checkpoint.integrity import verify

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adafactor": {"name": "adafactor"},
    "muon": {"name": "muon", "weight_decay": 0.1},
    "schedulefree": {"name": "schedulefree"},
}
SEQUENCE_PLAN = {"tensor": 2, "plan": tensor_models.SEQUENCE_PLAN}
TWO_RANKS = [
    Job("shard", parallel={"shard": 2}),
    Job("replicate", parallel={"replicate": 2}),
    Job("from-1-to-2", source="alone", parallel={"shard": 2}),
    Job("again", source="shard", parallel={"shard": 2}),
    Job("recomputed", "recomputing", parallel={"shard": 2}),
    Job("products-kept", "recomputing-but-products", parallel={"shard": 2}),
    Job("without-logits", "without-logits", parallel={"shard": 2}),
    *(
        Job(f"head-{name}", f"{name} without logits", sequences=8, parallel={"shard": 2})
        for name in ("llama", "untied-qwen3")
    ),
    Job("auto", parallel={"shard": 2}, is_auto=True),
    Job("bucket", parallel={"shard": 2}, is_in_bucket=True),
    Job("again-bucket", source="bucket", parallel={"shard": 2}, is_in_bucket=True),
    Job("by-time", parallel={"shard": 2}, steps=3, every="1h"),
    Job("llama-products", "llama-products", sequences=8, parallel={"tensor": 2}),
    Job("llama-2", "llama", sequences=8, parallel=SEQUENCE_PLAN),
    *(
        Job(f"llama-{name}", "llama", sequences=8, parallel={"tensor": 2}, optim=optim, steps=6)
        for name, optim in OPTIMIZERS.items()
    ),
    Job("lora-2", "lora", sequences=8, parallel=SEQUENCE_PLAN),
    Job("split-llama", "split-llama", parallel={"context": 2}),
    Job("split-qwen3", "split-qwen3", parallel={"context": 2}),
    Job("attending", "attending", parallel={"context": 2}),
]
FOUR_RANKS = [
    # Shards are not the ranks that follow each other, as where a ring is that way.
    Job("both", sequences=8, parallel={"replicate": 2, "shard": 2}, is_auto=True, order=[0, 2, 1, 3]),
    Job("from-2-to-4", source="shard", sequences=8, parallel={"replicate": 2, "shard": 2}),
    Job("lora-2-1-4", "lora", "lora-2-1", sequences=8, parallel={"tensor": 2, "shard": 2}),
    Job("qwen3-4", "qwen3", sequences=8, parallel={"tensor": 2, "shard": 2}),
    Job("split-llama-4", "split-llama", parallel={"context": 2, "shard": 2}),
    Job("attending-4", "attending", parallel={"context": 2, "replicate": 2}),
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with `alone`, the run of one process on PyTorch's own kernels."""
    directory = tmp_path_factory.mktemp("runs")
    small_run.train(directory / "alone", "cpu")
    return directory


@pytest.fixture(scope="module")
def said(runs: Path) -> dict[int, list[str]]:
    """What each of two and of four ranks said, which have done all jobs in `runs`."""
    of_two = launch(2, TWO_RANKS, runs)
    for name in ("llama", "lora"):
        go_on_alone(runs, f"{name}-2", f"{name}-2-1", name)
    return {2: of_two, 4: launch(4, FOUR_RANKS, runs)}


def go_on_alone(runs: Path, source: str, name: str, model: str | None = None, sequences: int = 8) -> None:
    small_run.begin_from(runs / source, runs / name)
    built = None if model is None else tensor_models.build(model)
    small_run.train(runs / name, "cpu", built, 8 // sequences, sequences)


def records(run: Path, file: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / f"{file}.jsonl").read_text().splitlines()]


def assert_alike(runs: Path, expected_name: str, name: str, rel: float = 1e-5) -> None:
    for file, keys in (("metrics", ("loss", "grad_norm")), ("evaluations", ("loss", "accuracy"))):
        expected, found = (records(runs / each, file) for each in (expected_name, name))
        assert [each["step"] for each in found] == [each["step"] for each in expected]
        for key in keys:
            values = [each[key] for each in expected]
            assert [each[key] for each in found] == pytest.approx(values, rel=rel), (name, file, key)


def flops_of_steps(runs: Path, name: str, chips: int) -> list[float]:
    steps = records(runs / name, "metrics")
    return [each["mfu"] * each["step_seconds"] * 1e9 * chips for each in steps]


def bits(runs: Path, name: str) -> list[str]:
    return [each["loss_hex"] for each in records(runs / name, "metrics")]


def test_two_and_four_ranks_train_as_one_process_and_go_on_from_each_others_checkpoints(
    runs: Path, said: dict[int, list[str]]
):
    first, second = said[2]
    assert first.count("x 2, a line: shard 2") == 1  # the plan's picture
    assert "a line" not in second
    go_on_alone(runs, "shard", "from-2-to-1", sequences=4)
    go_on_alone(runs, "both", "from-4-to-1", sequences=2)
    names = ("shard", "replicate", "both", "from-1-to-2", "from-2-to-4", "from-2-to-1", "from-4-to-1")
    for name in (*names, "recomputed", "products-kept", "without-logits", "auto"):
        assert_alike(runs, "alone", name)
    assert bits(runs, "again") == bits(runs, "shard")
    assert flops_of_steps(runs, "both", chips=4) == pytest.approx(flops_of_steps(runs, "alone", chips=1))
    last = records(runs / "both", "metrics")[-1]
    assert last["slowest_rank"] in range(4)
    assert last["slowest_rank_seconds"] > 0
    for name, world, num_parts in (("alone", 1, 2), ("shard", 2, 2), ("both", 4, 1)):
        for record in records(runs / name, "metrics"):
            assert record["part_of_loss"] * num_parts == pytest.approx(record["loss"], rel=1e-5)
            assert record["mean_rank"] == (world - 1) / 2  # over all ranks
            assert record["of_first"] == 1


def test_on_a_mounted_bucket_ranks_write_the_same_checkpoints(runs: Path, said: dict[int, list[str]]):
    assert [text.count("does not keep what several ranks write") for text in said[2]] == [2, 0]
    assert bits(runs, "bucket") == bits(runs, "again-bucket") == bits(runs, "shard")
    for stem in ("model", "optimizer"):
        file = f"checkpoints/step-20/{stem}.safetensors"
        assert (runs / "bucket" / file).read_bytes() == (runs / "shard" / file).read_bytes()
    verify(runs / "bucket" / "checkpoints" / "step-20")
    assert not [path for path in (runs / "bucket").rglob(".*") if path.name != ".lock"]


@pytest.mark.usefixtures("said")
def test_ranks_save_together_when_the_clock_of_one_says_so(runs: Path):
    saved = {each.name for each in (runs / "by-time" / "checkpoints").iterdir()}
    assert saved == {"step-2", "step-3"}  # the last one at the end


@pytest.mark.usefixtures("said")
def test_a_head_that_makes_the_loss_is_a_unit_of_its_own_and_trains_as_in_one_process(runs: Path):
    for name in ("llama", "untied-qwen3"):
        alone = f"alone-{name}"
        small_run.train(runs / alone, "cpu", tensor_models.build(name), 1, 8)
        assert_alike(runs, alone, f"head-{name}")


def test_ranks_that_share_layers_train_as_one_process_and_their_checkpoints_go_on_at_any_number(
    runs: Path, said: dict[int, list[str]]
):
    for name in ("llama", "lora", "qwen3"):
        small_run.train(runs / name, "cpu", tensor_models.build(name), 1, 8)
    go_on_alone(runs, "qwen3-4", "qwen3-4-1", "qwen3")
    assert "whole on each tensor rank" in said[4][0]
    assert "model.layers.*.input_layernorm.weight" in said[4][0]
    for name in ("llama-2", "llama-2-1", "llama-products"):
        assert_alike(runs, "llama", name)
    for name in ("lora-2", "lora-2-1", "lora-2-1-4"):
        assert_alike(runs, "lora", name)
    for name in ("qwen3-4", "qwen3-4-1"):
        assert_alike(runs, "qwen3", name)


def test_the_same_ranks_in_another_layout_draw_alike_only_within_a_data_rank(tmp_path: Path):
    llama = {"model": "llama", "sequences": 8}
    first, second = launch(
        2,
        [  # each checks the random numbers of its ranks at the end
            Job("replicas", **llama, parallel={"replicate": 2}),
            Job("then-tensor", **llama, source="replicas", parallel={"tensor": 2}),
            Job("tensor", **llama, parallel={"tensor": 2}),
            Job("then-replicas", **llama, source="tensor", parallel={"replicate": 2}),
            Job("then-shards", **llama, source="replicas", parallel={"shard": 2}),
        ],
        tmp_path,
    )
    assert (
        first.count("note: the checkpoint was made") == 2
    )  # at both changes of the data ranks, not for shards
    assert first.count("made by ranks that divided batches otherwise: random numbers on the devices (") == 2
    assert "note: the checkpoint" not in second


@pytest.mark.usefixtures("said")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_ranks_that_share_layers_train_with_other_optimizers_too(runs: Path, name: str):
    # Muon's iteration is in bfloat16, which the device rounds otherwise than PyTorch's kernels.
    device = "tpu" if name == "muon" else "cpu"
    small_run.train(
        runs / f"llama-{name}-alone", device, tensor_models.build("llama"), 1, 8, OPTIMIZERS[name], 6
    )
    assert_alike(runs, f"llama-{name}-alone", f"llama-{name}", rel=1e-4 if name == "muon" else 1e-5)


@pytest.mark.usefixtures("said")
@pytest.mark.parametrize("model", context_runs.MODELS)
def test_ranks_that_share_sequences_train_as_one_process(runs: Path, model: str):
    context_runs.train(model, runs / f"{model}-alone", "cpu")
    for job in (each for each in (*TWO_RANKS, *FOUR_RANKS) if each.model == model):
        assert_alike(runs, f"{model}-alone", job.name)


@pytest.mark.sweep
def test_from_four_ranks_a_run_goes_on_at_eight_and_at_two(runs: Path):
    launch(4, [Job("four", parallel={"shard": 4})], runs)
    launch(8, [Job("from-4-to-8", source="four", sequences=8, parallel={"replicate": 2, "shard": 4})], runs)
    two = {"replicate": 1, "shard": 2}
    launch(
        2,
        [
            Job("from-4-to-2", source="four", parallel=two),
            Job("from-8-to-2", source="from-4-to-8", sequences=2, parallel=two),
        ],
        runs,
    )
    for name in ("four", "from-4-to-8", "from-4-to-2", "from-8-to-2"):
        assert_alike(runs, "alone", name)
