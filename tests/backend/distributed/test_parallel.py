"""DDP, FSDP2, HSDP and tensor parallelism, PyTorch's own code on many ranks, train as one process does."""

import pytest

from tests.backend.distributed.ranks import assert_all_ended_well, run_ranks

TRAINING = """
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    from torch.nn import functional as F
    from torch.nn.parallel import DistributedDataParallel
    from torch.nn.utils import clip_grad_norm_

    STEPS, IN_REGION = 20, os.environ["HOW"] == "region"
    torch.manual_seed(0)
    X, Y = torch.randn(16, 8), torch.randint(0, 4, (16,))

    def build():
        torch.manual_seed(1)
        first = nn.Linear(8, 18), nn.ReLU(), nn.Linear(18, 18), nn.ReLU()
        return nn.Sequential(*first, nn.Linear(18, 5, bias=False), nn.Linear(5, 4))

    def train(model, parameters, x, y, mean_of=None, num_links=1):
        optimizer = torch.optim.AdamW(parameters, lr=1e-2)

        def step():
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            clip_grad_norm_(parameters, 0.5)
            optimizer.step()
            whole = loss.detach().clone()
            if mean_of is not None:
                dist.all_reduce(whole, dist.ReduceOp.AVG, group=mean_of)
            return whole

        region = torch.tpu.spmd(step)
        losses = []
        for _ in range(STEPS):
            losses.append((region if IN_REGION and x.is_tpu else step)().item())
        if IN_REGION and x.is_tpu:
            assert len(region.digests) == num_links  # 1: collectives, optimizer and all
        return torch.tensor(losses)

    def own_part(t):
        return t.chunk(world)[rank].to("tpu")

    def ddp():
        model = DistributedDataParallel(build().to("tpu"), bucket_cap_mb=0.001)
        return train(model, list(model.parameters()), own_part(X), own_part(Y), dist.group.WORLD)

    def fsdp(mesh=None):
        mesh = init_device_mesh("tpu", (world,)) if mesh is None else mesh
        model = build().to("tpu")
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        # 5 rows over the ranks are uneven shards: their norm and the optimizer are each rank's own links.
        return train(model, list(model.parameters()), own_part(X), own_part(Y), dist.group.WORLD, num_links=4)

    def hsdp():
        return fsdp(init_device_mesh("tpu", (2, world // 2), mesh_dim_names=("replicate", "shard")))

    def tensor_parallel(mesh=None):
        mesh = init_device_mesh("tpu", (world,)) if mesh is None else mesh
        model = build().to("tpu")
        plan = {
            "0": ColwiseParallel(),
            "2": RowwiseParallel(),
            "4": ColwiseParallel(output_layouts=Replicate()),
            "5": ColwiseParallel(output_layouts=Replicate()),
        }
        parallelize_module(model, mesh, {"0": plan["0"], "2": plan["2"]})
        layers = [*model[0].parameters(), *model[2].parameters()]
        return train(model, layers, X.to("tpu"), Y.to("tpu"))

    def both():
        mesh = init_device_mesh("tpu", (2, world // 2), mesh_dim_names=("data", "tensor"))
        model = build().to("tpu")
        parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh["data"])
        fully_shard(model, mesh=mesh["data"])
        row = mesh["data"].get_local_rank()
        layers = [*model[0].parameters(), *model[2].parameters()]
        x, y = X.chunk(2)[row].to("tpu"), Y.chunk(2)[row].to("tpu")
        return train(model, layers, x, y, mesh["data"].get_group(), num_links=4)

    def alone(device, names=None):
        model = build().to(device)
        parameters = [each for name, each in model.named_parameters() if names is None or name[0] in names]
        return train(model, parameters, X.to(device), Y.to(device))

    expected = {None: alone("cpu"), "02": alone("cpu", "02")}
    for name in os.environ["KINDS"].split():
        losses = {"ddp": ddp, "fsdp": fsdp, "hsdp": hsdp, "tp": tensor_parallel, "both": both}[name]()
        reference = expected["02" if name in ("tp", "both") else None]
        torch.testing.assert_close(losses, reference, rtol=1e-5, atol=0, msg=lambda text: f"{name}: {text}")
        print(name, "agrees", flush=True)
    print(torch.tpu.fallback_stats())
    dist.destroy_process_group()
"""


@pytest.mark.parametrize("how", ["eager", "region"])
@pytest.mark.parametrize(("world_size", "kinds"), [(2, "ddp fsdp tp"), (4, "fsdp hsdp both")])
def test_training_in_parallel_is_that_of_one_process(world_size: int, kinds: str, how: str):
    ranks = run_ranks(TRAINING, world_size, timeout=240, KINDS=kinds, HOW=how)
    assert_all_ended_well(ranks)
    for each in ranks:
        said = [line for line in each.stdout.splitlines() if not line.startswith("[Gloo]")]
        assert said == [*(f"{kind} agrees" for kind in kinds.split()), "{}"]


DIVERGING = """
    from torch import nn
    model = nn.Linear(6, 6).to("tpu")
    x = torch.randn(4, 6).to("tpu")
    held = []

    def step(number):
        model.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        for each in model.parameters():
            dist.all_reduce(each.grad, dist.ReduceOp.AVG)
            each.data.sub_(0.1 * each.grad)
        if rank == 0:
            if number % 3 == 0:
                held.append([each.detach().clone() for each in model.parameters()])
            if number % 5 == 0:
                str(loss), model.weight.sum().item()
            if number % 7 == 0:
                held.append(loss * 2)
        return loss

    for number in range(12):
        step(number)
    torch.tpu.synchronize()
    before = torch.tpu.compile_stats()["compilations"]
    for number in range(12, 212):
        step(number)
    torch.tpu.synchronize()
    if rank != 0:
        assert torch.tpu.compile_stats()["compilations"] == before
    sums = [None] * world
    dist.all_gather_object(sums, [each.double().sum().item() for each in model.parameters()])
    dist.destroy_process_group()
"""


def test_a_rank_prints_keeps_and_reads_what_it_likes_between_collectives():
    assert_all_ended_well(run_ranks(DIVERGING, 2, timeout=120))
