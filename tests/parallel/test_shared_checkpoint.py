"""One checkpoint that several ranks write, each its rows. Ranks are threads here, and their disk is one."""

import errno
import json
import os
import queue
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from mounted_bucket import mounted_bucket
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.backend.distributed.ranks import assert_all_ended_well, run_ranks
from tputrain.checkpoint.composed import compose, rows_path, write_apart
from tputrain.checkpoint.integrity import DamagedCheckpointError, verify
from tputrain.checkpoint.rows import Rows
from tputrain.checkpoint.store import CheckpointStore
from tputrain.checkpoint.tensor_files import Layout, Part, TensorSpec
from tputrain.parallel import meeting
from tputrain.parallel.world import World
from tputrain.parallel.writer import SharedWriter
from tputrain.snapshot import contents
from tputrain.snapshot.background import Written
from tputrain.snapshot.snapshot import Snapshot

RANKS = 3


class Thread(World):
    """The world as one of three ranks sees it, each a thread."""

    size = RANKS

    def __init__(self, rank: int, heard: list["queue.Queue[Any]"], keeps_rows: bool):
        self.rank, self._heard, self.keeps_rows = rank, heard, keeps_rows

    def first(self, function: Callable[[], Any]) -> Any:
        if self.rank > 0:
            return self._heard[self.rank].get(timeout=60)
        value = function()
        for each in self._heard[1:]:
            each.put(value)
        return value


def tensors(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {"wide": torch.randn(7, 5, generator=generator), "tall": torch.randn(2, 3, generator=generator)}


def snapshot(step: int, rank: int) -> Snapshot:
    def rows(tensor: Tensor) -> Rows:
        band = -(-len(tensor) // RANKS)
        part = tensor[rank * band : (rank + 1) * band]
        return Rows(TensorSpec(tuple(tensor.shape), tensor.dtype), min(rank * band, len(tensor)), part)

    model = {name: rows(tensor) for name, tensor in tensors(step).items()}
    state = json.dumps({"step": step})
    return Snapshot(step, nn.Linear(1, 1), None, model, {}, {"wide.moment": model["wide"]}, state)


def write(directory: Path, step: int, ranks: range = range(RANKS), keeps_rows: bool = True) -> list[Written]:
    """What each rank is told of the write."""
    told: dict[int, Any] = {}
    heard: list[queue.Queue[Any]] = [queue.Queue() for _ in range(RANKS)]

    def run(rank: int) -> None:
        writer = SharedWriter(Thread(rank, heard, keeps_rows))
        writer.start(CheckpointStore(directory), snapshot(step, rank))
        try:
            told[rank] = writer.finish()
        except BaseException as error:
            told[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert all(isinstance(each, Written) for each in told.values()), told
    return [told[rank] for rank in ranks]


def test_each_rank_writes_its_rows_and_vouches_for_them(tmp_path: Path) -> None:
    assert [each.error for each in write(tmp_path, 3)] == [None] * RANKS
    checkpoint = tmp_path / "step-3"
    verify(checkpoint)
    assert [path.name for path in tmp_path.iterdir()] == ["step-3"]
    found = load_file(checkpoint / "model.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors(3).items())
    sums = json.loads((checkpoint / "checksums.json").read_text())
    assert len(sums["model.safetensors"]["parts"]) > RANKS
    assert "sha256" in sums["state.json"]


def test_damage_to_any_rank_s_part_is_named(tmp_path: Path) -> None:
    write(tmp_path, 3)
    file = tmp_path / "step-3" / "model.safetensors"
    whole = file.read_bytes()
    for offset, num_bytes, _ in json.loads((file.parent / "checksums.json").read_text())[file.name]["parts"]:
        at = offset + num_bytes // 2
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(
            DamagedCheckpointError,
            match=rf"model\.safetensors: damaged \(the checksum of bytes {offset} to {offset + num_bytes} ",
        ):
            verify(file.parent)
    file.write_bytes(whole[:-1])
    with pytest.raises(DamagedCheckpointError, match=rf"{len(whole) - 1} bytes, expected {len(whole)}"):
        verify(file.parent)
    file.unlink()
    with pytest.raises(DamagedCheckpointError, match=r"model\.safetensors: missing"):
        verify(file.parent)


@pytest.mark.parametrize("bytes_a_file", [10**9, 1])
def test_where_a_file_has_one_writer_files_are_put_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bytes_a_file: int
) -> None:
    monkeypatch.setattr(
        contents, "layout_of", lambda stem, tensors: layout_of_small_files(stem, tensors, bytes_a_file)
    )
    write(tmp_path / "disk", 3)
    with mounted_bucket(tmp_path / "bucket"):
        told = write(tmp_path / "bucket", 3, keeps_rows=False)
    assert [each.error for each in told] == [None] * RANKS
    checkpoint = tmp_path / "bucket" / "step-3"
    verify(checkpoint)
    names = sorted(path.name for path in checkpoint.iterdir())
    assert names == sorted(path.name for path in (tmp_path / "disk" / "step-3").iterdir())
    assert len([name for name in names if name.startswith("model")]) == (1 if bytes_a_file > 1 else 3)
    for name in names:
        if name.endswith((".safetensors", ".index.json")):
            assert (checkpoint / name).read_bytes() == (tmp_path / "disk" / "step-3" / name).read_bytes()
    assert "sha256" not in json.loads((checkpoint / "checksums.json").read_text())[names[-2]]
    file = next(checkpoint.glob("model*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(DamagedCheckpointError, match=r"model.*damaged"):
        verify(checkpoint)


@pytest.mark.parametrize("missing", range(3))
def test_rows_that_nobody_has_written_are_told(tmp_path: Path, missing: int) -> None:
    parts_of = []
    for rank in range(3):
        placed = [(Part("file", 4 + 2 * rank, 2), memoryview(b"ab"))] if rank != missing else []
        parts_of.append(write_apart(rows_path(tmp_path, rank), placed))
    with pytest.raises(
        OSError, match=f"file: no rank has written what comes after its first {4 + 2 * missing} bytes"
    ):
        compose(tmp_path, "file", b"head", 10, parts_of)


def layout_of_small_files(stem: str, tensors: dict[str, Rows], bytes_a_file: int) -> Layout:
    wholes = {name: rows.whole for name, rows in tensors.items()}
    return Layout(stem, wholes, {"format": "pt"}, bytes_a_file)


def test_ranks_that_write_into_one_file_of_a_mounted_bucket_lose_rows(tmp_path: Path) -> None:
    """What `World.check_shared` finds out, and what would be lost without it."""
    whole = tmp_path / "whole"
    whole.write_bytes(bytes(2))
    with mounted_bucket(tmp_path):
        descriptors = [os.open(whole, os.O_WRONLY) for _ in range(2)]
        for offset, descriptor in enumerate(descriptors):
            os.pwrite(descriptor, b"x", offset)
        for descriptor in descriptors:
            os.close(descriptor)
    assert whole.read_bytes() == b"\0x"


@pytest.mark.parametrize("keeps_rows", [True, False])
def test_a_rank_that_never_writes_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keeps_rows: bool
) -> None:
    monkeypatch.setattr(meeting, "_PATIENCE", 0.3)
    written = write(tmp_path, 3, range(RANKS - 1), keeps_rows)
    assert len(written) == 2
    # The first rank may hear it of the other one.
    assert all((each.error or "").endswith("rank 2 has not written its part after 0 s") for each in written)
    assert CheckpointStore(tmp_path).steps() == []


@pytest.mark.parametrize("failing", range(RANKS))
def test_a_full_disk_of_one_rank_is_told_on_all_and_costs_nothing_that_was_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    write(tmp_path, 3)
    write_rows = Snapshot.write_rows

    def write_or_fail(self: Snapshot, directory: Path) -> Any:
        if self.model_tensors["wide"].first // 3 == failing:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write_rows(self, directory)

    monkeypatch.setattr(Snapshot, "write_rows", write_or_fail)
    who = "" if failing == 0 else f"rank {failing}: "
    assert [each.error for each in write(tmp_path, 4)] == [f"{who}No space left on device"] * RANKS
    monkeypatch.setattr(Snapshot, "write_rows", write_rows)
    assert CheckpointStore(tmp_path).steps() == [3]
    verify(tmp_path / "step-3")
    assert [each.error for each in write(tmp_path, 4)] == [None] * RANKS
    verify(tmp_path / "step-4")


def test_what_killed_ranks_have_left_is_not_taken_for_this_write(tmp_path: Path) -> None:
    unfinished = tmp_path / ".unfinished-step-3"
    unfinished.mkdir(parents=True)
    (unfinished / "model.safetensors").write_bytes(b"of another time")
    left = meeting.Meeting(tmp_path / ".unfinished-meeting-0", 0, RANKS)
    left.begin()
    left.say("written")
    assert [each.error for each in write(tmp_path, 3)] == [None] * RANKS
    verify(tmp_path / "step-3")
    assert [path.name for path in tmp_path.iterdir()] == ["step-3"]


OUTLASTS_THE_TIMEOUT = """
    from pathlib import Path
    from tputrain.checkpoint.store import CheckpointStore
    from tputrain.parallel.config import ParallelConfig
    from tputrain.parallel.world import Ranks

    ranks = Ranks(ParallelConfig(shard=2))
    assert (world, ranks.size, ranks.rank) == (2, 2, rank)
    longer = 0.75 * float(os.environ["GROUP_TIMEOUT"])

    class Mirror:
        def fetch(self, run_dir, is_wanted):
            assert ranks.is_first
            time.sleep(longer)  # twice: what is newer, and what is not here

        def has_any(self):
            return False

    store = CheckpointStore(Path(os.environ["RUNS"]) / "checkpoints")
    store.mirror = Mirror()
    assert ranks.first(store.newest) is None
    assert ranks.first(lambda: "heard") == "heard"
    dist.destroy_process_group()
"""


def test_ranks_wait_for_a_mirror_that_takes_longer_than_their_timeout(tmp_path: Path) -> None:
    ranks = run_ranks(
        OUTLASTS_THE_TIMEOUT,
        2,
        timeout=120,
        GROUP_BACKEND="cpu:gloo,tpu:tpu",
        GROUP_TIMEOUT="6",
        RUNS=str(tmp_path),
    )
    assert_all_ended_well(ranks)
