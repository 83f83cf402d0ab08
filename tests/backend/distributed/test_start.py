"""A process becomes a rank: by init_process_group, by a device mesh, or by its first use of the device."""

import subprocess
import sys
import textwrap
from pathlib import Path

from torch.distributed import TCPStore

from tests.backend.distributed.ranks import (
    assert_all_ended_well,
    environment_of_ranks,
    free_port,
    run_ranks,
)
from tests.backend.fresh_process import run_python

# What PROLOGUE asserts, where something else than init_process_group has begun.
ASSERTIONS = """
    import jax
    rank, world = dist.get_rank(), dist.get_world_size()
    assert (rank, world) == (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    assert dist.group.WORLD._get_backend(torch.device("tpu")).name() == "tpu"
    assert jax.process_count() == jax.device_count() == world and jax.local_device_count() == 1
    assert jax.process_index() == rank
"""

FIRST_USE = """
    import os, time
    import torch
    import torch.distributed as dist
    from datetime import timedelta

    if os.environ["RANK"] == "1":  # it begins with the group, the others with a tensor
        time.sleep(1)
        dist.init_process_group(timeout=timedelta(seconds=77))
    x = torch.full((3,), float(os.environ["RANK"]) + 1, device="tpu")
    assert torch.tpu.device_count() == 1
    assert (x * 2).tolist() == [2 * (float(os.environ["RANK"]) + 1)] * 3
    if not dist.is_initialized():
        dist.init_process_group(timeout=timedelta(seconds=77))
    from tpu_backend.distributed import peers
    assert peers.world.timeout == 77
"""


def test_a_first_use_before_the_group_waits_for_the_other_ranks() -> None:
    script = FIRST_USE + ASSERTIONS + "    dist.all_reduce(x)\n    assert x.tolist() == [6.0] * 3\n"
    assert_all_ended_well(run_ranks(script, 3, prologue=""))


def test_a_mesh_alone_starts_the_group() -> None:
    script = """
        import os
        import torch
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor

        mesh = init_device_mesh("tpu", (2,))
        x = distribute_tensor(torch.arange(6.0, device="tpu"), mesh, [Shard(0)])
        assert x.to_local().tolist() == ([0, 1, 2], [3, 4, 5])[mesh.get_rank()]
        assert x.sum().full_tensor().item() == 15
    """
    assert_all_ended_well(run_ranks(script + textwrap.indent(ASSERTIONS, "    "), 2, prologue=""))


def test_a_script_for_gpus_names_its_device_by_local_rank() -> None:
    script = """
        import os
        import torch
        import torch.distributed as dist
        from torch import nn

        local_rank = int(os.environ["LOCAL_RANK"])
        device = torch.device("tpu", local_rank)
        torch.accelerator.set_device_index(local_rank)
        dist.init_process_group(device_id=device)
        torch.manual_seed(0)
        model = nn.parallel.DistributedDataParallel(nn.Linear(2, 1).to(local_rank), device_ids=[local_rank])
        for x in (torch.full((3, 2), local_rank + 1.0), torch.full((3, 2), local_rank + 1.0).to(device)):
            model.zero_grad()
            model(x).sum().backward()
            assert model.module.weight.grad.tolist() == [[4.5, 4.5]]
    """
    assert_all_ended_well(run_ranks(script + textwrap.indent(ASSERTIONS, "    "), 2, prologue=""))


NAMED_BY_RANK = """
    import os, sys
    import torch
    import torch.distributed as dist
    from torch import nn

    def train(rank, port):
        os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port}
        torch.accelerator.set_device_index(rank)
        dist.init_process_group(rank=rank, world_size=2, device_id=torch.device("tpu", rank))
        model = nn.Linear(2, 1, bias=False).to(rank)
        model = nn.parallel.DistributedDataParallel(model, device_ids=[rank])
        model(torch.full((3, 2), rank + 1.0, device=f"tpu:{rank}")).sum().backward()
        assert model.module.weight.grad.tolist() == [[4.5, 4.5]]
        import jax
        assert jax.process_count() == jax.device_count() == 2 and jax.local_device_count() == 1
        dist.destroy_process_group()

    if __name__ == "__main__":
        torch.multiprocessing.spawn(train, sys.argv[1:], nprocs=2)
"""


def test_processes_of_spawn_name_their_device_by_rank(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(NAMED_BY_RANK))
    environment = {name: value for name, value in environment_of_ranks().items() if name != "LOCAL_RANK"}
    ended = subprocess.run(
        [sys.executable, str(script), str(free_port())],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr


def test_a_rank_without_local_rank_has_the_number_that_it_names_first() -> None:
    script = """
        del os.environ["LOCAL_RANK"]
        assert torch.ones(2).to(rank).device == torch.ones(2, device=f"tpu:{rank}").device
        if rank == 1:
            try:
                torch.ones(2, device="tpu:5")
            except RuntimeError as error:
                assert 'tpu:5 does not exist: ' in str(error)
                assert 'this process has named it "tpu:1" before' in str(error)
            else:
                raise AssertionError("a second number")
    """
    assert_all_ended_well(run_ranks(textwrap.indent(textwrap.dedent(script), "    "), 2))


CHILDREN = """
    import multiprocessing, os, subprocess, sys
    import torch
    import torch.distributed as dist
    from torch.utils.data import DataLoader, Dataset

    ALONE = "import torch, jax; x = torch.ones(2, device='tpu') + 1; print(x.tolist(), jax.process_count())"

    def use_it():
        import jax
        assert (torch.ones(2, device="tpu") + 1).tolist() == [2, 2] and jax.process_count() == 1

    class Numbers(Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            return torch.tensor(float(index))

    if __name__ == "__main__":
        # Before any rank uses the device, and on one rank only: whoever waited would wait for ever.
        if os.environ["RANK"] == "0":
            said = subprocess.check_output([sys.executable, "-c", ALONE], text=True)
            assert said == "[2.0, 2.0] 1\\n", said
            child = multiprocessing.get_context("spawn").Process(target=use_it)
            child.start()
            child.join(60)
            assert child.exitcode == 0
            assert torch.cat(list(DataLoader(Numbers(), num_workers=1))).tolist() == [0, 1, 2, 3]
        x = torch.ones(3, device="tpu")
        dist.init_process_group()
        dist.all_reduce(x)
        assert x.tolist() == [2.0] * 3 and dist.get_world_size() == 2
        import jax
        assert jax.process_count() == 2
"""


def test_children_of_a_rank_use_the_device_alone(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(CHILDREN))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ended = subprocess.run(
        [*launcher, str(script)], env=environment_of_ranks(), capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0, ended.stderr


def test_a_rank_that_does_not_come_is_named() -> None:
    script = """
        if int(os.environ["RANK"]) == 1:
            os._exit(0)
        dist.init_process_group(timeout=timedelta(seconds=3))
    """
    imports = "import os\nimport torch\nimport torch.distributed as dist\nfrom datetime import timedelta\n"
    # The launcher's store waits for its clients itself: here it is there before.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = run_ranks(
        script,
        2,
        prologue=imports,
        TORCHELASTIC_USE_AGENT_STORE="True",
        MASTER_PORT=str(store.port),
    )
    assert (
        ranks[0]
        .stderr.strip()
        .splitlines()[-1]
        .endswith("RuntimeError: init_process_group: rank 1 did not come within 3 s")
    )
    assert "timed out after 1000ms" not in ranks[0].stderr  # what PyTorch says of a wait in a store
    assert ranks[0].seconds < 30


SPAWNED = """
    import os, sys, time
    import tpu_backend
    import torch
    import torch.distributed as dist
    from datetime import timedelta

    def train(model, optimizer, x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    def trained(device, number):
        torch.manual_seed(5)
        model = torch.nn.Linear(4, 3).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        x = torch.arange(8.0).view(2, 4).to(device) + number
        step = torch.tpu.capture(train) if device == "tpu" else train
        return [lambda: step(model, optimizer, x).item() for _ in range(8)]

    def used_alone(rank):
        # What a process has made before it joins others: what it must find again afterwards.
        ours, theirs = trained("tpu", rank), trained("cpu", rank)
        for each, expected in zip(ours[:4], theirs[:4]):
            assert abs(each() / expected() - 1) < 1e-5
        whole = torch.arange(6.0, device="tpu").view(2, 3)
        row, shared, half = whole[1], whole.clone(), whole.to(torch.bfloat16) * 0.5
        flags, wide = whole > 2, torch.full((3,), 2**40 + rank, device="tpu")
        array = tpu_backend.to_jax(whole)
        torch.manual_seed(7)
        first_draw = torch.rand(3, device="tpu")
        recorded = whole.sum() * 2 + rank  # not computed yet
        row.add_(10)

        def check():
            assert whole.tolist() == [[0, 1, 2], [13, 14, 15]] and row.tolist() == [13, 14, 15]
            row.zero_()
            assert whole.tolist() == [[0, 1, 2], [0, 0, 0]]
            assert shared.tolist() == [[0, 1, 2], [3, 4, 5]] and half.tolist() == [[0, 0.5, 1], [1.5, 2, 2.5]]
            assert flags.tolist() == [[False] * 3, [True] * 3] and wide.tolist() == [2**40 + rank] * 3
            assert recorded.item() == 30 + rank and array.tolist() == [[0, 1, 2], [3, 4, 5]]
            then = torch.rand(3, device="tpu")
            torch.manual_seed(7)
            assert torch.equal(torch.rand(3, device="tpu"), first_draw)
            assert torch.equal(torch.rand(3, device="tpu"), then)
            for each, expected in zip(ours[4:], theirs[4:]):
                assert abs(each() / expected() - 1) < 1e-5

        return check

    def work(rank, file, kind):
        os.environ.update(RANK=str(rank), WORLD_SIZE="2")
        check = used_alone(rank) if kind == "used before" else lambda: None
        dist.init_process_group("tpu", store=dist.FileStore(file, 2), rank=rank, world_size=2,
                                timeout=timedelta(seconds=20))
        ASSERTIONS
        check()
        x = torch.full((4,), rank + 1.0, device="tpu")
        for _ in range(3):
            dist.all_reduce(x)
        assert x.tolist() == [12.0] * 4
        if kind == "raises":
            if rank == 1:
                raise ValueError("my own mistake")
            try:
                for _ in range(100):
                    dist.all_reduce(x)
                    x.tolist()
            except RuntimeError as error:
                print(f"rank 0 is told: {error}", flush=True)
                sys.exit(0)

    if __name__ == "__main__":
        torch.multiprocessing.start_processes(
            work, (sys.argv[1], sys.argv[2]), nprocs=2, start_method=sys.argv[3])
"""


def spawn(tmp_path: Path, kind: str, method: str) -> "subprocess.CompletedProcess[str]":
    script = tmp_path / "train.py"
    inside = textwrap.indent(textwrap.dedent(ASSERTIONS), "    ")
    script.write_text(textwrap.dedent(SPAWNED).replace("    ASSERTIONS\n", inside))
    command = [sys.executable, str(script), str(tmp_path / f"store-{kind}-{method}"), kind, method]
    return subprocess.run(command, env=environment_of_ranks(), capture_output=True, text=True, timeout=120)


def test_spawned_processes_meet_in_a_file_and_what_they_made_alone_moves_over(tmp_path: Path) -> None:
    ended = spawn(tmp_path, "used before", "spawn")
    assert ended.returncode == 0, ended.stderr


def test_the_error_of_a_spawned_rank_reaches_the_others(tmp_path: Path) -> None:
    for method in ("spawn", "fork"):
        ended = spawn(tmp_path, "raises", method)
        assert "failed: ValueError: my own mistake" in ended.stdout, ended.stdout + ended.stderr
        assert "ValueError: my own mistake" in ended.stderr
        assert ended.returncode == 1


USED_BEFORE = """
import torch
import torch.distributed as dist

x = torch.ones(2, device="tpu")
if {world_size} == 2:  # as on a chip: what a process has opened it cannot open again
    from tpu_backend.runtime import moving, platform
    chip = platform.Platform("tpu", "", platform.platform().devices)
    moving.platform = type("module", (), dict(platform=lambda: chip))
else:  # XLA's runtime begins anew, and nobody comes: the process goes on alone
    from tpu_backend.runtime import moving
    x *= 3
    try:
        moving.move_over(lambda: 1 / 0)
    except ZeroDivisionError:
        x /= 3
dist.init_process_group("tpu", store=dist.HashStore(), rank=0, world_size={world_size})
dist.all_reduce(x)
assert x.tolist() == [1, 1] and dist.get_world_size() == 1
print("done")
"""


def test_where_tensors_cannot_move_a_use_before_the_group_is_refused_and_named() -> None:
    ended = run_python(USED_BEFORE.format(world_size=2))
    said = ended.stderr.strip().splitlines()[-1]
    assert said.startswith("RuntimeError: init_process_group: this process has used the tpu device before")
    assert "<string>:5" in said
    assert "a tpu device is opened once in a process" in said


def test_a_use_before_a_group_of_one_is_allowed_also_where_others_did_not_come() -> None:
    ended = run_python(USED_BEFORE.format(world_size=1))
    assert ended.stdout == "done\n", ended.stderr


def test_the_service_is_found_through_the_store_and_not_by_master_addr() -> None:
    script = """
        import os
        import torch
        import torch.distributed as dist

        address = f"tcp://127.0.0.1:{os.environ['STORE_PORT']}"
        dist.init_process_group(
            "tpu", init_method=address, rank=int(os.environ["RANK"]), world_size=2)
        x = torch.ones(2, device="tpu")
        dist.all_reduce(x)
        assert x.tolist() == [2, 2]
    """
    ranks = run_ranks(
        script + textwrap.indent(ASSERTIONS, "    "),
        2,
        prologue="",
        MASTER_ADDR="192.0.2.1",  # nobody's: a documentation address
        STORE_PORT=str(free_port()),
    )
    assert_all_ended_well(ranks)
