"""One rank compiles a program and the others load it; what all have loaded is not kept."""

from typing import Any

import jax
import pytest
from jax._src import distributed

from tests.backend.distributed.ranks import assert_all_ended_well, run_ranks
from tpu_backend.distributed import sharing

PROGRAMS = """
        from jax._src import distributed
        from tpu_backend.distributed import sharing

        def kept():
            found = distributed.global_state.client.key_value_dir_get_bytes("tpu/program/")
            return [len(whole) for _, whole in found]
"""


def test_what_a_subgroup_has_loaded_is_not_kept() -> None:
    script = """
        groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        x = torch.ones(7, device="tpu")
        dist.all_reduce(x, group=groups[rank // 2])
        assert x.tolist() == [2.0] * 7
        dist.barrier()
        sizes = [size for size in kept() if size > 1]
        print(len(sizes), "kept")
        dist.barrier()
    """
    ranks = run_ranks(PROGRAMS + script, 4)
    assert_all_ended_well(ranks)
    # Each program was run by a whole group, or by all ranks.
    assert [each.stdout.splitlines()[-1] for each in ranks] == ["0 kept"] * 4


def test_what_nobody_loads_is_bounded() -> None:
    script = """
        sharing._ROOM = 40_000
        if rank == 0:
            for size in range(2, 14):  # programs that no other rank runs
                (torch.ones(size, device="tpu") * 2 + 1).tolist()
            sizes = kept()
            assert sizes.count(1) > 0, sizes
            assert sum(size for size in sizes if size > 1) < 40_000, sizes
        dist.barrier()
        if rank == 1:  # one that was taken back, and one that is there
            for size in (2, 13):
                assert (torch.ones(size, device="tpu") * 2 + 1).tolist() == [3.0] * size
        dist.barrier()
    """
    assert_all_ended_well(run_ranks(PROGRAMS + script, 2))


def test_a_program_that_cannot_be_published_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[tuple[str, bytes]] = []

    class Client:
        def key_value_set_bytes(self, key: str, value: bytes, **_: Any) -> None:
            if value != sharing._GIVEN_UP:
                raise jax.errors.JaxRuntimeError("too large")
            written.append((key, value))

    monkeypatch.setattr(distributed.global_state, "client", Client())
    monkeypatch.setattr(sharing, "_leases", {"key"})
    sharing.publish("key", {}, b"program")
    sharing.give_up("key")  # there is nothing to give up
    assert written == [("tpu/program/key", sharing._GIVEN_UP)]
