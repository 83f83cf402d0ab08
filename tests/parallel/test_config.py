"""Degrees fit the ranks or are refused in one line; batches are divided, each sample once."""

import errno
import json
from pathlib import Path
from typing import TextIO

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from tputrain import RunConfig, Trainer
from tputrain.batches import counted
from tputrain.errors import UserError
from tputrain.parallel import launch, launched
from tputrain.parallel.apply import blocks
from tputrain.parallel.config import ParallelConfig
from tputrain.parallel.slices import rounds, slices
from tputrain.recipe import read_recipe
from tputrain.shipped import find_recipe


@pytest.mark.parametrize(
    ("degrees", "world_size", "expected"),
    [
        ({}, 1, (1, 1)),
        ({"shard": -1}, 8, (1, 8)),
        ({"replicate": -1, "shard": 4}, 8, (2, 4)),
        ({"replicate": 2, "shard": 4}, 8, (2, 4)),
    ],
)
def test_the_rest_is_worked_out(degrees: dict[str, int], world_size: int, expected: tuple[int, int]):
    resolved = ParallelConfig(**degrees).resolved(world_size)
    assert (resolved["replicate"], resolved["shard"]) == expected


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["parallel.shard=2", "parallel.processes=3"], "degrees (shard 2) that multiply to .* which is 3"),
        (["parallel.shard=-1", "parallel.replicate=-1"], "parallel.shard=-1: expected a number"),
        (["parallel.replicate=3", "parallel.shard=-1", "parallel.processes=4"], "replicate 3 x shard -1"),
        (["parallel.shard=0"], "parallel.shard=0: expected 1 or more, or -1"),
        (["parallel.plan={'*.q_proj': colwize}"], "parallel.plan.*.q_proj=colwize: expected one of colwise"),
        (
            ["parallel.plan={'*.o_proj': {style: rowwise, output: heads}}"],
            "parallel.plan.*.o_proj.output=heads: expected one of replicate, sequence, features",
        ),
        (["parallel.plan={'*.o_proj': {output: sequence}}"], "expected {style, input, output}"),
        (["parallel.plan={'*.o_proj': {style: whole, output: sequence}}"], "no output with the style whole"),
        (
            ["parallel.context=2", "parallel.tensor=2"],
            "parallel.context=2: expected 1 with parallel.tensor so far",
        ),
        (
            ["parallel.shard=3", "parallel.processes=3"],
            "batch.sequences=8: expected a multiple of 3, the ranks that share a batch, such as 9",
        ),
        (["parallel=auto", "parallel.shard=2"], "parallel.shard=2: expected no degrees with parallel.auto"),
        (["parallel.shards=2"], "unknown key; nearest known key: parallel.shard"),
    ],
)
def test_degrees_that_do_not_fit_are_refused_in_one_line(overrides: list[str], message: str):
    with pytest.raises(UserError, match=message.replace("(", r"\(").replace(")", r"\)")) as caught:
        read_recipe(find_recipe("llama"), overrides)
    assert "\n" not in str(caught.value)


def test_degrees_without_the_processes_for_them_are_refused():
    cfg = RunConfig(device="cpu", parallel=ParallelConfig(shard=2))
    with pytest.raises(UserError, match=r"parallel\.shard=2: .* the number of processes, which is 1"):
        Trainer(nn.Linear(2, 2), cfg)


def test_auto_is_a_key_and_a_word_in_place_of_the_degrees(tmp_path: Path):
    recipe = find_recipe("llama")
    assert read_recipe(recipe, ["parallel=auto", "parallel.processes=3"]).parallel == ParallelConfig(
        auto=True, processes=3
    )
    (tmp_path / "my.yaml").write_text("include: [model/llama-5m, optim/adamw]\nparallel: auto\n")
    assert read_recipe(tmp_path / "my.yaml").parallel.auto


def test_auto_alone_divides_nothing():
    model = nn.Linear(2, 2)
    Trainer(model, RunConfig(device="cpu", parallel=ParallelConfig(auto=True)))
    assert type(model) is nn.Linear


def test_processes_without_degrees_are_told_which_to_add():
    with pytest.raises(
        UserError,
        match=r"there are 2 processes, .* add parallel\.shard=2 \(or parallel\.replicate=2, or parallel=auto",
    ):
        ParallelConfig().resolved(2)


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({}, ""),
        ({"TORCHELASTIC_RUN_ID": "none", "GROUP_WORLD_SIZE": "1"}, "torchrun --nproc-per-node 4 -m "),
        ({"TORCHELASTIC_RUN_ID": "none", "GROUP_WORLD_SIZE": "2"}, ""),
        ({"TORCHELASTIC_RUN_ID": launched.RUN_ID, "GROUP_WORLD_SIZE": "1"}, ""),
    ],
)
def test_what_starts_as_many_ranks_again_is_told(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], said: str
):
    for name, value in {"LOCAL_WORLD_SIZE": "4", **variables}.items():
        monkeypatch.setenv(name, value)
    assert launched.launched_by() == said


def test_what_a_rank_leaves_of_its_error_is_there_as_a_whole_or_not_at_all(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """A rank may be killed while it writes, or the disk be full: torch's launcher ends at a broken file."""
    left, in_writing = tmp_path / "rank-1.error.json", []
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "TORCHELASTIC_ERROR_FILE": str(left)}.items():
        monkeypatch.setenv(name, value)

    def full(data: object, file: TextIO) -> None:
        file.write('{"message"')
        file.flush()
        in_writing.append(left.exists())
        raise OSError(errno.ENOSPC, "no space")

    with monkeypatch.context() as patch:
        patch.setattr(json, "dump", full)
        launched.record_error(UserError("first"))
    assert in_writing == [False]
    assert not [*tmp_path.iterdir()]
    with monkeypatch.context() as patch:  # torchrun's, where it keeps no logs
        patch.setenv("TORCHELASTIC_ERROR_FILE", "")
        patch.chdir(tmp_path)
        launched.record_error(UserError("nowhere"))
    assert not [*tmp_path.iterdir()]
    launched.record_error(UserError("second"))
    assert json.loads(left.read_text())["message"]["message"] == "UserError: second"


def test_ranks_on_another_device_than_tpu_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="device=cpu: expected tpu with 2 processes"):
        Trainer(nn.Linear(2, 2), RunConfig(device="cpu", parallel=ParallelConfig(shard=-1)))


@given(samples=st.integers(1, 20), count=st.integers(1, 6))
def test_rounds_hold_each_sample_once_and_slices_of_one_length(samples: int, count: int):
    batch = {
        "x": torch.arange(samples),
        "pair": [torch.arange(samples) * 2, "text"],
        "scalar": torch.tensor(3),
    }
    found = rounds(batch, count)
    assert all(len(each) == count for each in found)
    parts = [part for each in found for part in each if part is not None]
    assert torch.cat([part["x"] for part in parts]).tolist() == list(range(samples))
    assert torch.cat([part["pair"][0] for part in parts]).tolist() == [2 * n for n in range(samples)]
    assert all(part["scalar"].item() == 3 for part in parts)
    assert all(len({len(part["x"]) for part in each if part is not None}) == 1 for each in found)
    assert len(found) == (samples >= count) + (samples % count > 0)
    if samples % count == 0:
        assert [part["x"].tolist() for part in slices(batch, count)] == [part["x"].tolist() for part in parts]


@given(st.lists(st.lists(st.integers(0, 9), min_size=3, max_size=3), min_size=1, max_size=4))
def test_factors_of_ranks_make_the_mean_over_all_labels(weights: list[list[int]]):
    if not any(map(sum, weights)):
        return
    losses = [[float(10 * micro + rank) for rank in range(3)] for micro in range(len(weights))]
    sums = []
    for rank in range(3):
        batches, factors = counted(losses, weights, rank)
        assert len(batches) == sum(1 for each in weights if sum(each))  # equally many calls on every rank
        sums.append(sum(loss * factor for loss, factor in zip(batches, factors, strict=True)))
    flat = [(w, x) for ws, xs in zip(weights, losses, strict=True) for w, x in zip(ws, xs, strict=True)]
    expected = sum(w * x for w, x in flat) / sum(w for w, _ in flat)
    assert sum(sums) / 3 == pytest.approx(expected)


def test_a_tensor_that_is_not_by_sample_is_refused():
    with pytest.raises(UserError, match=r"a batch of 4 samples holds a tensor of shape \(3, 2\)"):
        slices([torch.zeros(4), torch.zeros(3, 2)], 2)


def test_the_elements_of_outer_module_lists_are_the_blocks():
    inner = nn.ModuleList([nn.Linear(2, 2)])
    block = nn.ModuleDict({"a": inner})
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ModuleList([block, nn.ReLU(), nn.Linear(3, 3)])))
    assert [type(each) for each in blocks(model)] == [nn.ModuleDict, nn.Linear]


def test_what_failed_first_is_told_with_rank_and_line(tmp_path: Path, capfd: pytest.CaptureFixture):
    def failure(message: str, line: int, exitcode: int = 1) -> ProcessFailure:
        extra = {
            "py_callstack": f'File "a.py", line 1\n  File "model.py", line {line}, in f',
            "timestamp": "7",
        }
        path = tmp_path / "error.json"
        path.write_text(json.dumps({"message": {"message": message, "extraInfo": extra}}))
        return ProcessFailure(local_rank=3, pid=1, exitcode=exitcode, error_file=str(path))

    launcher = launch.Launcher(ParallelConfig(shard=4, processes=4), tmp_path, [], [], lambda: 0)
    assert launcher._tell(failure("ValueError: my own\nmistake", 31)) == 1
    told = capfd.readouterr().err
    assert "tputrain: rank 3 failed first: ValueError: my own mistake at model.py:31; " in told
    assert f"what it said: {tmp_path}/ranks/rank-3.err" in told
    assert launcher._tell(failure("UserError: lr=0: expected more", 31, exitcode=2)) == 2
    assert capfd.readouterr().err.strip() == "tputrain: lr=0: expected more"
