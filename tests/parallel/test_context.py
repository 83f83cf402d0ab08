"""Sequences that are cut over ranks (parallel.context) train as whole ones in one process do."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from tests.backend.distributed.ranks import assert_all_ended_well, run_ranks
from tputrain import ExecutionConfig, ParallelConfig, RunConfig
from tputrain.batches import IGNORED_LABEL, counted
from tputrain.errors import UserError
from tputrain.parallel.limits import check_limits
from tputrain.parallel.slices import columns

sys.path.insert(0, str(Path(__file__).parent))

import context_runs

SCRIPT = """
    sys.path.insert(0, os.environ["HERE"])
    from pathlib import Path
    import context_runs
    from tputrain.errors import UserError
    from tputrain.models.sequence import sequence_split

    runs = Path(os.environ["RUNS"])
    for name in ("llama", "attending"):
        trainer = context_runs.train(name, runs / name, "tpu", context=2)
        assert trainer.world.size == trainer.world.context_size == world == 2
        assert trainer.world.data_size == 1 and trainer.world.data_rank == rank
        weight = next(trainer.model.parameters())
        assert weight.to_local().numel() * 2 == weight.numel()
        assert len(trainer.train_step._region.digests) == 1  # the step is one program
    assert not torch.tpu.fallback_stats(), torch.tpu.fallback_stats()
    try:
        with sequence_split(trainer.world.sequence):
            torch.nn.Linear(2, 2)(torch.ones(1, 2))
        raise AssertionError("a model without attention over all of a sequence was taken")
    except UserError as error:
        assert "attention sees only the part of a sequence" in str(error)
    dist.destroy_process_group()
"""


def records(run: Path, file: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / f"{file}.jsonl").read_text().splitlines()]


def test_two_ranks_that_share_sequences_train_as_one_process(tmp_path: Path) -> None:
    environment = {"GROUP_BACKEND": "cpu:gloo,tpu:tpu", "HERE": str(Path(__file__).parent)}
    environment["TPU_CACHE_DIR"] = str(tmp_path / "programs")
    assert_all_ended_well(run_ranks(SCRIPT, 2, timeout=300, RUNS=str(tmp_path), **environment))
    for name in ("llama", "attending"):
        context_runs.train(name, tmp_path / f"{name}-alone", "cpu")
        for file, keys in (("metrics", ("loss", "grad_norm")), ("evaluations", ("loss", "accuracy"))):
            alone, found = records(tmp_path / f"{name}-alone", file), records(tmp_path / name, file)
            assert [each["step"] for each in found] == [each["step"] for each in alone]
            for key in keys:
                expected = [each[key] for each in alone]
                assert [each[key] for each in found] == pytest.approx(expected, rel=1e-5), (name, file, key)


def test_a_part_without_labels_counts_nothing_and_is_run_all_the_same() -> None:
    labels = torch.tensor([[1, 2, IGNORED_LABEL, IGNORED_LABEL]])
    batch = {"input_ids": torch.arange(4)[None], "labels": labels}
    parts = columns(batch, 2)
    assert [each["position_ids"].tolist() for each in parts] == [[[0, 1]], [[2, 3]]]
    nothing = [{**each, "labels": torch.full((1, 2), IGNORED_LABEL)} for each in parts]
    # Two ranks that share sequences with labels, and two whose sequences have none.
    for rank, labelled in ((0, [[1, 2]]), (2, [[1, 2]]), (3, [[0, IGNORED_LABEL]])):
        (taken,), (factor,) = counted([[*parts, *nothing]], [[2, 0, 0, 0]], rank, context=2)
        assert taken["labels"].tolist() == labelled
        assert taken["input_ids"].tolist() == [[[0, 1]], [[2, 3]]][rank % 2]
        assert factor == (4.0 if rank == 0 else 0.0)


def test_what_cannot_be_cut_is_refused_in_one_line() -> None:
    ids = torch.zeros(2, 6, dtype=torch.int64)
    for batch, message in (
        ({"input_ids": ids, "labels": ids}, r"parallel.context=4: a sequence of 6 tokens does not divide"),
        ([ids, ids], r"parallel.context=4: expected batches of text"),
    ):
        with pytest.raises(UserError, match=message) as caught:
            columns(batch, 4)
        assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match=r"attention_mask in a batch has the shape \(2, 1, 6\)"):
        columns({"input_ids": ids, "labels": ids, "attention_mask": ids[:, None]}, 2)
    world = cast(Any, SimpleNamespace(size=2, context_size=2, tensor_size=1))
    cfg = RunConfig(execution=ExecutionConfig(train="compile"), parallel=ParallelConfig(context=2))
    with pytest.raises(UserError, match=r"execution.train=compile: expected fused, strict, debug with par"):
        check_limits(world, cfg, context_runs.Attending(), context_runs.loss_of)
    with pytest.raises(UserError, match=r"parallel.context=2: Linear may shift labels itself"):
        check_limits(world, RunConfig(parallel=ParallelConfig(context=2)), nn.Linear(1, 1), None)
