"""What torch.distributed has beside collectives, on two ranks in one launch: SyncBatchNorm, transfers that
cross or come from any rank, pipeline schedules, ZeroRedundancyOptimizer, uninitialised buffers, uneven
DTensors, AdamW of DTensors, FSDP2's first step in parts.
"""

import pytest

from tests.backend.distributed.ranks import Rank, assert_all_ended_well, run_ranks

FEATURES = """
    import copy, time
    from collections import Counter

    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    other = 1 - rank

    def as_it_is(function):
        return function

    WAYS = {"eager": as_it_is, "region": torch.tpu.spmd}

    # ---- SyncBatchNorm

    def network():
        torch.manual_seed(3)
        made = nn.Sequential(
            nn.Conv2d(3, 4, 3, bias=False),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Conv2d(4, 5, 3),
            nn.BatchNorm2d(5, affine=False, momentum=None),
            nn.Flatten(),
            nn.Linear(80, 3),
            nn.BatchNorm1d(3, track_running_stats=False),
        )
        with torch.no_grad():
            made[1].weight.copy_(torch.linspace(0.5, 2, 4))
        return made

    def sync_batch_norm(way):
        torch.manual_seed(4)
        sizes = (3, 5)  # rows of each rank
        batches = [torch.randn(8, 3, 8, 8) * 2 + 1 for _ in range(3)]
        weights = torch.randn(8, 3)

        def train(model, x_of, rows, step_as):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

            def step(x, weight):
                optimizer.zero_grad()
                y = model(x)
                loss = (y * weight).sum()
                loss.backward()
                if rows != slice(None):
                    for each in model.parameters():
                        dist.all_reduce(each.grad)
                        each.grad.div_(8)
                    dist.all_reduce(loss.detach())
                else:
                    for each in model.parameters():
                        each.grad.div_(8)
                optimizer.step()
                return loss.detach(), x.grad

            step = step_as(step)
            seen = []
            for batch in batches:
                x = x_of(batch[rows]).requires_grad_()
                x.grad = torch.zeros_like(x)
                seen.append([each.cpu() for each in step(x, x_of(weights[rows]))])
            return seen

        mine = slice(0, sizes[0]) if rank == 0 else slice(sizes[0], 8)
        whole, part = network(), nn.SyncBatchNorm.convert_sync_batchnorm(network()).to("tpu")
        assert sum(isinstance(each, nn.SyncBatchNorm) for each in part) == 3
        expected = train(whole, lambda t: t.clone(), slice(None), as_it_is)
        found = train(part, lambda t: t.to("tpu"), mine, WAYS[way])
        for (whole_loss, whole_grad), (loss, grad) in zip(expected, found, strict=True):
            torch.testing.assert_close(loss, whole_loss, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(grad, whole_grad[mine], rtol=1e-4, atol=1e-5)
        assert part.state_dict().keys() == whole.state_dict().keys()
        for name, value in whole.state_dict().items():
            torch.testing.assert_close(part.state_dict()[name].cpu(), value, rtol=1e-4, atol=1e-5, msg=name)
        assert torch.tpu.fallback_stats() == {}

    def sync_batch_norm_of_an_empty_batch():
        torch.manual_seed(5)
        x = torch.randn(4, 3, 2)
        whole, part = nn.BatchNorm1d(3), nn.SyncBatchNorm(3).to("tpu")
        x_whole, mine = x.clone().requires_grad_(), (x if rank == 0 else x[:0]).to("tpu").requires_grad_()
        whole(x_whole).square().sum().backward()
        y = part(mine)
        y.square().sum().backward()
        torch.testing.assert_close(part.running_var.cpu(), whole.running_var)
        if rank == 0:
            torch.testing.assert_close(mine.grad.cpu(), x_whole.grad, rtol=1e-4, atol=1e-5)
        else:
            assert y.shape == (0, 3, 2)

    def sync_batch_norm_of_16_bit():
        torch.manual_seed(6)
        x = torch.randn(6, 3, 5).bfloat16()
        whole, part = nn.BatchNorm1d(3), nn.SyncBatchNorm(3).to("tpu")
        expected = whole(x.float())
        y = part(x[3 * rank : 3 * rank + 3].to("tpu"))
        assert y.dtype == torch.bfloat16 and part.running_mean.dtype == torch.float32
        torch.testing.assert_close(y.cpu().float(), expected[3 * rank : 3 * rank + 3], rtol=0.02, atol=0.02)
        torch.testing.assert_close(part.running_var.cpu(), whole.running_var)

    # ---- transfers

    def recv_from_any_rank():
        for number, shape in enumerate(((3,), (3,), (2, 2))):
            for sender in range(world):
                t = torch.full(shape, float(rank + 10 * number), device="tpu")
                if sender == rank:
                    dist.send(t, other)
                else:
                    assert dist.recv(t) == sender
                    assert t.cpu().tolist() == torch.full(shape, float(sender + 10 * number)).tolist()

    def transfers_that_cross():
        sent, received = torch.full((4,), float(rank), device="tpu"), torch.empty(4, device="tpu")
        works = [dist.irecv(received, other), dist.isend(sent, other)]
        for each in works:
            assert each.wait()
        assert received.tolist() == [float(other)] * 4

    def transfers_with_tags():
        sent = [torch.full((4,), 10.0 * rank + tag, device="tpu") for tag in (1, 2)]
        received = [torch.empty(4, device="tpu") for _ in range(2)]
        works = [dist.isend(each, other, tag=tag) for tag, each in enumerate(sent, 1)]
        works += [dist.irecv(received[tag - 1], other, tag=tag) for tag in (1, 2)]
        for each in works:
            each.wait()
        assert [each[0].item() for each in received] == [10.0 * other + 1, 10.0 * other + 2]

    def transfers_to_oneself():
        received = torch.empty(3, device="tpu")
        into = dist.irecv(received, rank)
        dist.isend(torch.arange(3.0, device="tpu"), rank).wait()
        into.wait()
        assert received.tolist() == [0, 1, 2]

    def a_send_that_nobody_waits_for():
        t = torch.full((2,), 7.0 * rank, device="tpu")
        work = dist.isend(t, 1) if rank == 0 else dist.irecv(t, 0)
        dist.all_reduce(torch.ones(1, device="tpu"))  # the group goes on
        assert t.tolist() == [0.0, 0.0]
        end = time.monotonic() + 10  # to read the sent tensor is not to wait for the transfer
        while not work.is_completed() and time.monotonic() < end:
            time.sleep(0.01)
        assert work.is_completed()

    def many_transfers_in_flight():
        sizes = [n % 4 + 1 for n in range(40)]
        sent = [torch.full((size,), float(100 * rank + n), device="tpu") for n, size in enumerate(sizes)]
        received = [torch.empty(size, device="tpu") for size in sizes]
        works = []
        for n in range(40):
            works += [dist.isend(sent[n], other), dist.irecv(received[n], other)]
        for each in reversed(works):
            each.wait()
        for n in range(40):
            assert received[n].tolist() == [float(100 * other + n)] * sizes[n]

    def transfers_in_a_region():
        @torch.tpu.spmd
        def exchanged(x):
            y = torch.empty_like(x)
            dist.batch_isend_irecv([dist.P2POp(dist.isend, x, other), dist.P2POp(dist.irecv, y, other)])
            return y

        try:
            exchanged(torch.ones(2, device="tpu"))
        except RuntimeError as error:
            assert "send and recv in a region" in str(error) and "all_to_all" in str(error), error
        else:
            raise AssertionError("not refused")

    # ---- pipelines: each rank has one of two stages, and the batch goes through them in four parts

    def pipeline(schedule_of):
        torch.manual_seed(8)
        stages = [nn.Sequential(nn.Linear(6, 16), nn.Tanh()), nn.Sequential(nn.Linear(16, 3), nn.Softplus())]
        own = copy.deepcopy(stages[rank]).to("tpu")
        stage = PipelineStage(own, rank, world, torch.device("tpu"))
        schedule = schedule_of(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.5) for each in (*stages, own)]
        compilations = []
        for _ in range(5):
            x, target, losses = torch.randn(8, 6), torch.randn(8, 3), []
            if rank == 0:
                schedule.step(x.to("tpu"))
            else:
                output = schedule.step(target=target.to("tpu"), losses=losses)
            expected_output = stages[1](stages[0](x))
            expected_loss = nn.functional.mse_loss(expected_output, target)
            expected_loss.backward()
            if rank == 1:
                torch.testing.assert_close(output.cpu(), expected_output)
                torch.testing.assert_close(torch.stack(losses).mean().cpu(), expected_loss)
            for ours, theirs in zip(own.parameters(), stages[rank].parameters(), strict=True):
                torch.testing.assert_close(ours.grad.cpu(), theirs.grad, rtol=1e-4, atol=1e-6)
            for each in optimizers:
                each.step()
                each.zero_grad()
            compilations.append(torch.tpu.compile_stats()["compilations"])
        assert compilations[-1] == compilations[-2], compilations
        assert torch.tpu.fallback_stats() == {}

    # ---- ZeroRedundancyOptimizer

    def zero_redundancy_optimizer():
        def build():
            torch.manual_seed(7)
            return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))

        torch.manual_seed(8)
        x, y = torch.randn(8, 4), torch.randn(8, 2)
        mine = slice(4 * rank, 4 * rank + 4)
        whole, everything = build(), slice(None)
        optimizer = torch.optim.AdamW(whole.parameters(), lr=0.02)
        model = nn.parallel.DistributedDataParallel(build().to("tpu"))
        zero = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW, lr=0.02)
        for _ in range(4):
            for net, its, rows, device in ((whole, optimizer, everything, "cpu"), (model, zero, mine, "tpu")):
                its.zero_grad()
                (net(x[rows].to(device)) - y[rows].to(device)).square().mean().backward()
                its.step()
        for expected, found in zip(whole.parameters(), model.module.parameters(), strict=True):
            torch.testing.assert_close(found.detach().cpu(), expected.detach(), rtol=1e-5, atol=1e-6)
        zero.consolidate_state_dict(to=0)
        if rank == 0:
            state = zero.state_dict()["state"]
            assert len(state) == 4 and all(each["step"] == 4 for each in state.values())
        assert sum(len(each) > 0 for each in zero.optim.state.values()) < 4  # a part of the state

    # ---- uninitialised buffers

    def uninitialised_buffers(way):
        def run():
            t = torch.full((3,), 5.0, device="tpu") if rank == 0 else torch.empty(3, device="tpu")
            dist.broadcast(t, 0)
            into = torch.empty(2 * world, 3, device="tpu")
            dist.all_gather_into_tensor(into, torch.full((2, 3), float(rank), device="tpu"))
            junk = torch.empty(4, device="tpu")
            dist.all_reduce(junk)
            parts = torch.empty(world, 2, device="tpu")
            exchanged = torch.empty(world, 2, device="tpu")
            parts[rank] = 1.0
            dist.all_to_all_single(exchanged, parts)
            return t, into, junk, exchanged

        t, into, junk, exchanged = WAYS[way](run)()
        assert t.tolist() == [5.0] * 3
        assert into.tolist() == [[float(each // 2)] * 3 for each in range(2 * world)]
        assert junk.shape == (4,) and junk.cpu().shape == (4,)
        assert exchanged[rank].tolist() == [1.0, 1.0]

    # ---- DTensors of 7x6 over two ranks

    def uneven_redistribution():
        mesh = init_device_mesh("tpu", (world,))
        whole = torch.arange(42.0).view(7, 6)
        x = distribute_tensor(whole.to("tpu"), mesh, [Shard(0)])
        assert x.to_local().shape == ((4, 6) if rank == 0 else (3, 6))
        columns = x.redistribute(placements=[Shard(1)])
        assert torch.equal(columns.to_local().cpu(), whole.chunk(2, 1)[rank])
        assert torch.equal(x.redistribute(placements=[Replicate()]).to_local().cpu(), whole)
        rows = columns.redistribute(placements=[Shard(0)])
        assert torch.equal(rows.to_local().cpu(), whole.chunk(2, 0)[rank])
        assert (x * 2).sum().full_tensor().item() == 2 * whole.sum()

    # ---- AdamW of DTensors: each rank steps with its parts, in one operation

    def adamw_of_dtensors():
        mesh = init_device_mesh("tpu", (world,))
        torch.manual_seed(5)
        weights = [torch.randn(7, 3), torch.randn(1, 4), torch.randn(5)]
        placements = [[Shard(0)], [Shard(0)], [Replicate()]]
        alone = [nn.Parameter(each.clone()) for each in weights]
        divided = [
            nn.Parameter(distribute_tensor(each.to("tpu"), mesh, placed))
            for each, placed in zip(weights, placements)
        ]
        plain = nn.Parameter(torch.ones(2, device="tpu"))
        assert divided[1].to_local().numel() == (4 if rank == 0 else 0)
        steps = [
            torch.optim.AdamW(parameters, lr=0.1, amsgrad=True) for parameters in (alone, [*divided, plain])
        ]
        for number in range(3):
            plain.grad = torch.ones_like(plain)
            for one, part in zip(alone, divided):
                one.grad = torch.full_like(one, 0.5) * one.detach().sin()
                part.grad = distribute_tensor(one.grad.to("tpu"), mesh, part.placements)
            before = torch.tpu.compile_stats()["ops_recorded"]
            versions = [each._version for each in divided]
            for each in steps:
                each.step()
            if number:
                assert torch.tpu.compile_stats()["ops_recorded"] == before + 1
            assert all(each._version > version for each, version in zip(divided, versions))
        for one, part in zip(alone, divided):
            torch.testing.assert_close(part.full_tensor().cpu(), one.detach(), rtol=1e-5, atol=1e-6)

    def adamw_of_partial_gradients():
        mesh = init_device_mesh("tpu", (world,))
        alone = nn.Parameter(torch.linspace(-1, 1, 6))
        divided = nn.Parameter(distribute_tensor(alone.detach().to("tpu"), mesh, [Replicate()]))
        alone.grad = torch.full((6,), 3.0)
        own = torch.full((6,), 1.0 + rank, device="tpu")
        divided.grad = DTensor.from_local(own, mesh, [Partial()])  # 1 and 2: each rank has a summand
        for parameter in (alone, divided):
            torch.optim.AdamW([parameter], lr=0.1).step()
        torch.testing.assert_close(divided.full_tensor().cpu(), alone.detach(), rtol=1e-5, atol=1e-6)

    # DDP's gradients are parts of one buffer, too.
    def adamw_of_bucket_views():
        before = torch.tpu.fallback_stats()
        torch.manual_seed(7)
        alone = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        x = torch.randn(4, 8)
        ours = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        ours.load_state_dict(alone.state_dict())
        ddp = nn.parallel.DistributedDataParallel(ours.to("tpu"), gradient_as_bucket_view=True)
        for model, rows in ((alone, x), (ddp, x.chunk(2)[rank].to("tpu"))):
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
            for _ in range(3):
                optimizer.zero_grad(set_to_none=False)
                model(rows).square().mean().backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
        storages = {each.grad.untyped_storage().data_ptr() for each in ours.parameters()}
        assert len(storages) == 1
        for one, expected in zip(ours.parameters(), alone.parameters()):
            torch.testing.assert_close(one.detach().cpu(), expected.detach(), rtol=1e-5, atol=1e-5)
        assert torch.tpu.fallback_stats() == before

    # DDP makes its buckets anew in the second forward pass, which is in the middle of the first call.
    def ddp_accumulates_in_a_region(as_views):
        torch.manual_seed(7)
        alone, ours = (nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))) for _ in range(2))
        ours.load_state_dict(alone.state_dict())
        options = {"bucket_cap_mb": 0.0001, "gradient_as_bucket_view": as_views}
        model = nn.parallel.DistributedDataParallel(ours.to("tpu"), **options)
        batches = torch.randn(4, 2, 2 * world, 4)

        def step(net, optimizer, halves):
            optimizer.zero_grad()
            for half in halves:
                net(half).square().mean().backward()
            optimizer.step()

        own = batches.unflatten(2, (world, 2))[:, :, rank].to("tpu")
        for net, rows, call in ((alone, batches, step), (model, own, torch.tpu.spmd(step))):
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
            for halves in rows:
                call(net, optimizer, halves)
        for one, expected in zip(ours.parameters(), alone.parameters()):
            torch.testing.assert_close(one.detach().cpu(), expected.detach(), rtol=1e-5, atol=1e-6)

    # ---- FSDP2's first step in parts: also the layer that gathers for none after it is like the others

    def layers_share_programs(**options):
        mesh, num_layers = init_device_mesh("tpu", (world,)), 5

        def layer():
            parts = nn.RMSNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 16), nn.SiLU(), nn.Linear(16, 8)
            return nn.Sequential(*parts)

        def network():
            torch.manual_seed(6)
            return nn.Sequential(nn.Linear(8, 8), *(layer() for _ in range(num_layers)))

        def stepping(model, **options):
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **options)

            def step(x):
                optimizer.zero_grad()
                loss = model(x).square().mean()
                loss.backward()
                optimizer.step()
                return loss.detach()

            return step

        model, alone = network().to("tpu"), network()
        for each in model[1:]:
            fully_shard(each, mesh=mesh)
        fully_shard(model, mesh=mesh)
        step = torch.tpu.spmd(stepping(model, **options))
        x = torch.linspace(-1, 1, 32).view(4, 8)
        before = torch.tpu.fallback_stats()
        with torch.tpu.eager_mode("fused", parts="always"):
            loss = step(x.to("tpu"))
        torch.testing.assert_close(loss.cpu(), stepping(alone)(x), rtol=1e-5, atol=1e-6)
        for part, whole in zip(model.parameters(), alone.parameters()):
            torch.testing.assert_close(part.full_tensor().cpu(), whole.detach(), rtol=1e-4, atol=1e-4)
        assert torch.tpu.fallback_stats() == before
        times = Counter(step.digests)
        assert list(times.values()).count(num_layers) == 4, times  # forward, backward, moments, AdamW

    # What is gathered late is what it was gathered of, also where that has changed since.
    def gathers_before_updates():
        def layers(device, gathered):
            shards = [torch.full((4,), 1.0 + rank + number, device=device) for number in range(5)]
            x = torch.linspace(-1, 1, 4 * world, device=device)
            for shard, whole in [(shard, gathered(shard)) for shard in shards]:
                shard.mul_(2).add_(x[:4])
                for _ in range(6):
                    x = (x * whole).tanh().exp().sub(1)
            return [x, *shards]

        def gathered(shard):
            whole = torch.empty(4 * world, device="tpu")
            dist.all_gather_into_tensor(whole, shard)
            return whole

        region = torch.tpu.spmd(lambda: layers("tpu", gathered))
        with torch.tpu.eager_mode("fused", parts="always"):
            found = region()
        assert len(region.digests) > 1
        expected = layers("cpu", lambda shard: torch.cat([shard - rank + other for other in range(world)]))
        for ours, theirs in zip(found, expected):
            torch.testing.assert_close(ours.cpu(), theirs)

    CHECKS = {
        "SyncBatchNorm": lambda: sync_batch_norm("eager"),
        "SyncBatchNorm in a region": lambda: sync_batch_norm("region"),
        "SyncBatchNorm of an empty batch": sync_batch_norm_of_an_empty_batch,
        "SyncBatchNorm of bfloat16": sync_batch_norm_of_16_bit,
        "recv from any rank": recv_from_any_rank,
        "transfers that cross": transfers_that_cross,
        "transfers with tags": transfers_with_tags,
        "transfers to oneself": transfers_to_oneself,
        "a send that nobody waits for": a_send_that_nobody_waits_for,
        "many transfers in flight": many_transfers_in_flight,
        "transfers in a region are refused": transfers_in_a_region,
        "GPipe": lambda: pipeline(ScheduleGPipe),
        "1F1B": lambda: pipeline(Schedule1F1B),
        "ZeroRedundancyOptimizer": zero_redundancy_optimizer,
        "uninitialised buffers": lambda: uninitialised_buffers("eager"),
        "uninitialised buffers in a region": lambda: uninitialised_buffers("region"),
        "uneven redistribution": uneven_redistribution,
        "AdamW of DTensors": adamw_of_dtensors,
        "AdamW of partial gradients": adamw_of_partial_gradients,
        "AdamW of DDP's bucket views": adamw_of_bucket_views,
        "DDP accumulates in a region": lambda: ddp_accumulates_in_a_region(as_views=False),
        "DDP accumulates in a region, views": lambda: ddp_accumulates_in_a_region(as_views=True),
        "layers share programs": layers_share_programs,
        "gathers before updates": gathers_before_updates,
        "layers share programs, fused AdamW": lambda: layers_share_programs(fused=True),
    }
    chosen = os.environ.get("CHECKS", "").split(",")
    for name, check in CHECKS.items():
        if chosen == [""] or name in chosen:
            begin = time.monotonic()
            check()
            print(f"passed: {name}", flush=True)
            print(f"{time.monotonic() - begin:.1f} s: {name}", file=sys.stderr, flush=True)
    dist.destroy_process_group()
"""

CHECKS = FEATURES.partition("CHECKS = {")[2].partition("}")[0].strip()
NAMES = [line.split('"')[1] for line in CHECKS.splitlines()]


@pytest.fixture(scope="module")
def ranks() -> list[Rank]:
    return run_ranks(FEATURES, 2, timeout=200)


@pytest.mark.parametrize("name", NAMES)
def test_a_feature_works_on_two_ranks(ranks: list[Rank], name: str):
    for number, each in enumerate(ranks):
        assert f"passed: {name}\n" in each.stdout, f"rank {number}:\n{each.stderr[-4000:]}"


def test_both_ranks_end_well(ranks: list[Rank]):
    assert_all_ended_well(ranks)
