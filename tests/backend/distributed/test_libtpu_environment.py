"""What libtpu is told in each rank, for the slices that people rent; sources in `libtpu_environment.py`."""

import re

import pytest

from tests.backend.distributed.ranks import run_ranks
from tpu_backend.distributed import libtpu_environment
from tpu_backend.distributed.libtpu_environment import (
    SLICES,
    Place,
    environment_of,
    facts,
    is_arranged_by_user,
    slice_of,
)

# By accelerator type: the ranks, the ranks of a host, and the bounds of the processes.
GOLDEN = {
    "v4-8": (4, 4, "2,2,1"),
    "v5litepod-8": (8, 8, "2,4,1"),
    "v5e-8": (8, 8, "2,4,1"),
    "v5e-16": (16, 4, "4,4,1"),
    "v5p-16": (8, 4, "2,2,2"),
    "v6e-8": (8, 8, "2,4,1"),
    "v6e-16": (16, 4, "4,4,1"),
    "tpu7x-8": (8, 8, "2,2,1,2"),
}


def places(world_size: int, per_host: int) -> list[Place]:
    return [
        Place(f"10.0.0.{rank // per_host}", 9000 + rank, rank % per_host, rank // per_host)
        for rank in range(world_size)
    ]


@pytest.mark.parametrize("kind", GOLDEN)
def test_each_rank_of_a_slice_has_one_device(kind: str) -> None:
    world_size, per_host, bounds = GOLDEN[kind]
    found = slice_of({"ACCELERATOR_TYPE": kind}, world_size)
    assert (found.num_devices, found.devices_per_host) == (world_size, per_host)
    where = places(world_size, per_host)
    addresses = ",".join(f"10.0.0.{rank // per_host}:{9000 + rank}" for rank in range(world_size))
    for rank in range(world_size):
        assert environment_of(rank, found, where) == {
            "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1",
            "TPU_PROCESS_BOUNDS": bounds,
            "TPU_PROCESS_ADDRESSES": addresses,
            "TPU_PROCESS_PORT": str(9000 + rank),
            "TPU_VISIBLE_CHIPS": str(rank % per_host),
            "CLOUD_TPU_TASK_ID": str(rank),
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        }


def test_bounds_that_the_platform_gives_come_before_the_table() -> None:
    bounds = {"ACCELERATOR_TYPE": "v5litepod-16", "HOST_BOUNDS": "1,2,1", "CHIPS_PER_HOST_BOUNDS": "4,2,1"}
    assert environment_of(9, slice_of(bounds, 16), places(16, 8))["TPU_PROCESS_BOUNDS"] == "4,4,1"


def test_an_unknown_slice_and_a_wrong_number_of_ranks_are_one_clear_line() -> None:
    with pytest.raises(RuntimeError, match=r"is unknown \(TPU_ACCELERATOR_TYPE is 'v9-4'\): set TPU_HOST"):
        slice_of({"ACCELERATOR_TYPE": "v9-4"}, 4)
    with pytest.raises(RuntimeError, match=r"v4-8\) has 4 devices on 1 hosts, and the world has 8 ranks"):
        slice_of({"ACCELERATOR_TYPE": "v4-8"}, 8)


def test_ranks_out_of_the_physical_order_are_named() -> None:
    swapped = [*places(8, 4)[4:], *places(8, 4)[:4]]
    with pytest.raises(
        RuntimeError, match=r"rank 0 is device 0 of TPU worker 1 \(10\.0\.0\.1\), number 4 of"
    ):
        environment_of(0, SLICES["v5p-16"], swapped)


def test_the_platform_is_asked_by_variables_and_then_by_its_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TPU_ACCELERATOR_TYPE", "TPU_HOST_BOUNDS", "TPU_CHIPS_PER_HOST_BOUNDS", "TPU_WORKER_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("TPU_SKIP_MDS_QUERY", raising=False)
    text = "ACCELERATOR_TYPE: 'v4-16'\nCHIPS_PER_HOST_BOUNDS: '2,2,1'\nHOST_BOUNDS: '1,1,2'\nWORKER_ID: '1'\n"
    monkeypatch.setattr(libtpu_environment, "_METADATA", "data:," + text.replace("\n", "%0A"))
    found = facts()
    assert found["WORKER_ID"] == "1"
    assert slice_of(found, 8).hosts == (1, 1, 2)
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", "v6e-8")
    assert facts() == {"ACCELERATOR_TYPE": "v6e-8"}


def test_what_the_user_arranged_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TPU_PROCESS_BOUNDS", "TPU_VISIBLE_CHIPS", "TPU_VISIBLE_DEVICES", "CLOUD_TPU_TASK_ID"):
        monkeypatch.delenv(name, raising=False)
    assert not is_arranged_by_user()
    monkeypatch.setenv("TPU_VISIBLE_DEVICES", "0")
    assert is_arranged_by_user()


APPLIED = """
    import os
    import torch
    import torch.distributed as dist
    from tpu_backend.runtime import platform

    def told(name):
        names = ("TPU_PROCESS_BOUNDS", "TPU_VISIBLE_CHIPS", "CLOUD_TPU_TASK_ID", "TPU_PROCESS_PORT")
        raise LookupError(";".join(os.environ[name] for name in (*names, "TPU_PROCESS_ADDRESSES")))

    platform._open_devices = told  # where libtpu would read it
    torch.ones(2, device="tpu") if os.environ["KIND"] == "first use" else dist.init_process_group()
"""


@pytest.mark.parametrize("kind", ["first use", "group"])
def test_libtpu_is_told_before_it_starts(kind: str) -> None:
    bounds = {"TPU_HOST_BOUNDS": "1,1,1", "TPU_CHIPS_PER_HOST_BOUNDS": "1,2,1", "TPU_SKIP_MDS_QUERY": "1"}
    ranks = run_ranks(APPLIED, 2, prologue="", TPU_PLATFORM="tpu", KIND=kind, **bounds)
    said = [re.search(r"LookupError: (1,2,1;.*)", each.stderr) for each in ranks]
    assert all(said), ranks[0].stderr + ranks[1].stderr
    told = [match[1].split(";") for match in said if match is not None]
    addresses = ",".join(f"127.0.0.1:{port}" for *_, port, _ in told)
    assert told == [["1,2,1", str(rank), str(rank), told[rank][3], addresses] for rank in range(2)]
