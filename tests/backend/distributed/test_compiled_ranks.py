"""torch.compile on two ranks, in one launch: collectives in graphs, DDP, FSDP2, DTensor, tensor and sequence
parallelism give what eager mode gives, and in a region a compiled step is one program.
"""

import pytest

from tests.backend.distributed.ranks import Rank, assert_all_ended_well, run_ranks

COMPILED = """
    import torch.distributed._functional_collectives as functional
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import (
        ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module,
    )
    from torch.nn.parallel import DistributedDataParallel

    everybody = dist.group.WORLD
    mesh = init_device_mesh("tpu", (world,))

    def compiled(function, **options):
        return torch.compile(function, backend="tpu", **options)

    def same(found, expected):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)

    def functional_collectives():
        def f(x, rows):
            whole = functional.all_reduce(x * 2, "sum", everybody)
            gathered = functional.all_gather_tensor(whole + x, 0, everybody)
            part = functional.reduce_scatter_tensor(rows * 3, "sum", 0, everybody)
            exchanged = functional.all_to_all_single(rows, None, None, everybody)
            sent = functional.broadcast(x, 1, everybody)
            return whole.sum() + gathered.sum(), gathered, part, exchanged * 2, sent + 1

        x, rows = torch.randn(2, 3, device="tpu"), torch.randn(4, 3, device="tpu")
        g = compiled(f, fullgraph=True)
        for _ in range(2):
            same(g(x, rows), f(x, rows))

    def collectives_in_place():
        def f(x):
            y = x * 2
            dist.all_reduce(y)
            whole = torch.empty(world * 2, 3, device="tpu")
            dist.all_gather_into_tensor(whole, y)
            return whole + 1

        x = torch.randn(2, 3, device="tpu")
        same(compiled(f, fullgraph=True)(x), f(x))

    def layers():
        torch.manual_seed(1)
        first = nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU()
        return nn.Sequential(*first, nn.Linear(16, 4)).to("tpu")

    def train(model, x, y, in_region=False):
        # foreach takes no mixture of tensors and DTensors.
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)

        def step(x, y):
            optimizer.zero_grad()
            loss = (model(x) - y).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        region = torch.tpu.spmd(step)
        losses = torch.tensor([(region if in_region else step)(x, y).item() for _ in range(3)])
        if in_region:
            assert len(region.digests) == 1, region.digests
        return losses

    def own_batch():
        torch.manual_seed(2 + rank)
        return torch.randn(4, 8).to("tpu"), torch.randn(4, 4).to("tpu")

    def ddp():
        expected = train(DistributedDataParallel(layers()), *own_batch())
        same(train(compiled(DistributedDataParallel(layers())), *own_batch()), expected)
        same(train(DistributedDataParallel(compiled(layers())), *own_batch(), in_region=True), expected)

    def fsdp():
        def sharded(prepare):
            model = layers()
            for layer in model:
                if isinstance(layer, nn.Linear):
                    prepare(layer)
                    fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
            return model

        expected = train(sharded(lambda layer: None), *own_batch())
        layer_by_layer = sharded(lambda layer: layer.compile(backend="tpu"))
        same(train(layer_by_layer, *own_batch(), in_region=True), expected)
        whole = sharded(lambda layer: None)
        whole.compile(backend="tpu")
        same(train(whole, *own_batch()), expected)

    def dtensors():
        torch.manual_seed(3)
        w = distribute_tensor(torch.randn(8, 6).to("tpu"), mesh, [Shard(0)])
        x = distribute_tensor(torch.randn(4, 6).to("tpu"), mesh, [Replicate()])

        def f(x, w):
            return (x @ w.t()).redistribute(placements=[Replicate()]).to_local()

        same(compiled(f, fullgraph=True)(x, w), f(x, w))

    def tensor_parallel():
        def parallel():
            return parallelize_module(layers(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})

        torch.manual_seed(2)
        x, y = torch.randn(4, 8).to("tpu"), torch.randn(4, 4).to("tpu")
        same(train(compiled(parallel()), x, y), train(parallel(), x, y))

    def sequence_parallel():
        def parallel():
            torch.manual_seed(1)
            inner = nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)
            model = nn.Sequential(nn.LayerNorm(8), *inner, nn.LayerNorm(8))
            plan = {
                "0": SequenceParallel(use_local_output=True),
                "1": ColwiseParallel(input_layouts=Shard(1)),
                "3": RowwiseParallel(output_layouts=Shard(1)),
                "4": SequenceParallel(use_local_output=True),
            }
            return parallelize_module(model.to("tpu"), mesh, plan)

        torch.manual_seed(2)
        x = torch.randn(2, 4, 8).chunk(world, 1)[rank].contiguous().to("tpu")
        y = torch.zeros_like(x)
        same(train(compiled(parallel()), x, y, in_region=True), train(parallel(), x, y))

    CHECKS = {
        "functional collectives": functional_collectives,
        "collectives in place": collectives_in_place,
        "DDP": ddp,
        "FSDP2": fsdp,
        "DTensors": dtensors,
        "tensor parallelism": tensor_parallel,
        "sequence parallelism": sequence_parallel,
    }
    for name, check in CHECKS.items():
        begin = time.monotonic()
        torch._dynamo.reset()
        check()
        print(f"passed: {name}", flush=True)
        print(f"{time.monotonic() - begin:.1f} s: {name}", file=sys.stderr, flush=True)
    dist.destroy_process_group()
"""

CHECKS = COMPILED.partition("CHECKS = {")[2].partition("}")[0].strip()
NAMES = [line.split('"')[1] for line in CHECKS.splitlines()]


@pytest.fixture(scope="module")
def ranks() -> list[Rank]:
    return run_ranks(COMPILED, 2, timeout=200)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_compiled_gives_what_eager_mode_gives(ranks: list[Rank], name: str):
    for number, each in enumerate(ranks):
        assert f"passed: {name}\n" in each.stdout, f"rank {number}:\n{each.stderr[-4000:]}"


def test_both_ranks_end_well(ranks: list[Rank]):
    assert_all_ended_well(ranks)
