"""Regions of many ranks: links with collectives are the same program in all of them, also where shards are
uneven; parameters keep their own dims; a slice's start is a constant where all ranks agree.
"""

import re

import pytest

from tests.backend.distributed.ranks import assert_all_ended_well, run_ranks

TRAINING = """
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.nn import functional as F
    from torch.nn.utils import clip_grad_norm_
    from tpu_backend.runtime import compiler, packed

    STEPS, VOCABULARY = 20, 50257
    # AdamW makes steps of one size of gradients of any size, so float32's rounding shows in weights near 0.
    BOUNDS = {torch.float32: dict(rtol=1e-5, atol=1e-6), torch.float64: dict(rtol=1e-10, atol=0)}
    mesh = init_device_mesh("tpu", (world,))
    texts, lower = [], compiler.lower_segment

    def lower_and_keep(description, target):
        lowered, checks = lower(description, target)
        texts.append(lowered.as_text())
        return lowered, checks

    compiler.lower_segment = lower_and_keep

    def of_all(thing):
        every = [None] * world
        dist.all_gather_object(every, thing)
        return every

    def train(model, x, y, is_rank, norm=None):
        \"\"\"The losses of all ranks' rows, and the digests of the last step.\"\"\"
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

        @torch.tpu.spmd
        def step():
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            if norm is not None:
                clip_grad_norm_(model.parameters(), norm)
            optimizer.step()
            mean = loss.detach().clone()
            if is_rank:
                dist.all_reduce(mean, dist.ReduceOp.AVG)
            return mean

        losses, compilations = [], []
        for _ in range(STEPS):
            losses.append((step if is_rank else step._function)().item())
            compilations.append(torch.tpu.compile_stats()["compilations"])
        if is_rank:
            assert compilations[1] == compilations[-1], compilations
        return torch.tensor(losses, dtype=torch.float64), step.digests

    def train_as_one_process_does(build, x, y, norm=None):
        \"\"\"The same training by all ranks and by this process; the digests of the ranks' last step.\"\"\"
        model, alone = build().to("tpu"), build()
        for part in model.children():
            fully_shard(part, mesh=mesh)
        fully_shard(model, mesh=mesh)
        own = [each.chunk(world)[rank].to("tpu") for each in (x, y)]
        losses, digests = train(model, *own, True, norm)
        expected, _ = train(alone, x, y, False, norm)
        torch.testing.assert_close(losses, expected, rtol=1e-5, atol=0)
        for name, parameter in model.state_dict().items():
            whole = alone.state_dict()[name]
            torch.testing.assert_close(parameter.full_tensor().cpu(), whole, **BOUNDS[whole.dtype], msg=name)
        return digests

    # ---- shards that are uneven: 50,257 and 10 rows, and a parameter smaller than the world

    class Uneven(nn.Module):
        def __init__(self, dtype):
            super().__init__()
            torch.manual_seed(1)
            self.embedding = nn.Embedding(VOCABULARY, 4)
            self.tiny = nn.Parameter(torch.tensor([0.5]))
            self.hidden = nn.Linear(4, 8)
            self.head = nn.Linear(8, 10)
            self.to(dtype)

        def forward(self, x):
            return self.head(torch.tanh(self.hidden(self.embedding(x) * self.tiny)))

    torch.manual_seed(0)
    x, y = torch.randint(0, VOCABULARY, (16,)), torch.randint(0, 10, (16,))
    x[:2] = torch.tensor([0, VOCABULARY - 1])
    for norm, dtype in ((None, torch.float32), (0.5, torch.float64)):
        digests = train_as_one_process_does(lambda: Uneven(dtype), x, y, norm)
        # Links in turn: of all ranks, with the collectives; and each rank's own.
        assert len(digests) == (2 if norm is None else 4), digests
        for place, each in enumerate(zip(*of_all(digests))):
            assert (len(set(each)) == 1) == (place % 2 == 0), (place, each)

    # ---- parameters packed in their own dims, whose shards are even

    class Layer(nn.Module):
        def __init__(self, hidden):
            super().__init__()
            self.norm, self.up = nn.RMSNorm(8), nn.Linear(8, hidden)
            self.down = nn.Linear(hidden, 8, bias=False)

        def forward(self, x):
            return x + self.down(F.silu(self.up(self.norm(x))))

    def two_layers(hidden):
        torch.manual_seed(1)
        return nn.Sequential(Layer(hidden), Layer(hidden))

    torch.manual_seed(0)
    x, y = torch.randn(16, 8), torch.randint(0, 8, (16,))
    gathers = []
    for joins, hidden in ((True, 24), (False, 28)):
        # On a TPU each parameter has a collective of its own; the same is forced here.
        packed._joins_collectives = lambda joins=joins: joins
        texts.clear()
        digests = train_as_one_process_does(lambda: two_layers(hidden), x, y)
        assert len(digests) == 1
        # one rank lowers a program
        gathers.append(max(text.count('"stablehlo.all_gather"') for each in of_all(texts) for text in each))
    assert gathers[1] == 4 * gathers[0] > 0, gathers  # of a layer; of each of its four parameters

    # ---- 7 rows over the ranks, there and back: collectives of tensors that are padded

    whole = torch.arange(42.0).view(7, 6)

    @torch.tpu.spmd
    def there_and_back(x):
        rows = DTensor.from_local(x, mesh, [Replicate()]).redistribute(mesh, [Shard(0)])
        columns = (rows * 2).redistribute(mesh, [Shard(1)])
        return columns.redistribute(mesh, [Replicate()]).to_local()

    for _ in range(20):
        torch.testing.assert_close(there_and_back(whole.to("tpu")).cpu(), whole * 2, rtol=0, atol=0)
    print(torch.tpu.fallback_stats())
    dist.destroy_process_group()
"""


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_train_as_one_process_does_and_launch_the_same_collectives(world_size: int):
    ranks = run_ranks(TRAINING, world_size, timeout=200)
    assert_all_ended_well(ranks)
    for each in ranks:
        assert each.stdout.splitlines()[-1] == "{}"


STARTS = """
    from torch.distributed.device_mesh import init_device_mesh

    def compilations():
        return torch.tpu.compile_stats()["compilations"]

    def train(start_of, shift=0.0):
        \"\"\"The programs of eight calls of a region that sums slices over the ranks.\"\"\"
        x = torch.arange(64.0).reshape(32, 2).to("tpu") + shift
        found = []
        sliced = lambda number: x[number : number + 2] * 3

        @torch.tpu.spmd
        def total(start):
            part = sliced(start)
            dist.all_reduce(part)
            return part + 1

        for step in range(8):
            total(start_of(step, rank))
        # what comes once more is right, and was compared before
        for step in range(8):
            result = total(start_of(step, rank)).cpu()
            starts = [start_of(step, each) for each in range(world)]
            whole = torch.arange(64.0).reshape(32, 2) + shift
            expected = sum(whole[start : start + 2] * 3 for start in starts) + 1
            torch.testing.assert_close(result, expected, rtol=0, atol=0)
            found.append(total.digests)
        return found

    # A constant where all agree: another constant start is another program.
    first, = set(train(lambda step, rank: 4))
    assert len(first) == 1
    moves = train(lambda step, rank: 4 + step)
    assert len(set(moves)) == 1 and moves[0] != first
    differs = train(lambda step, rank: 9 * rank)
    assert set(differs) == set(moves)  # it is an input for ever
    by_rank = train(lambda step, rank: step * rank)
    assert set(by_rank) == set(moves)
    every = [None] * world
    dist.all_gather_object(every, [first, moves[0]])
    assert every == [every[0]] * world

    # In a mesh of several dimensions each rank is in groups of its own, and still one rank compiles.
    mesh = init_device_mesh("tpu", (1, world), mesh_dim_names=("copies", "parts"))

    @torch.tpu.spmd
    def in_both(x):
        for name in ("copies", "parts"):
            dist.all_reduce(x, group=mesh.get_group(name))
        return x * 7

    ones, before = torch.ones(5).to("tpu"), compilations()
    assert in_both(ones).cpu().tolist() == [7.0 * world] * 5
    dist.all_gather_object(every, [compilations() - before, in_both.digests])
    assert sorted(count for count, _ in every) == [0] * (world - 1) + [1], every
    assert all(digests == in_both.digests for _, digests in every), every

    # What follows a read depends on data: shapes of the rank's own, new ones at any time.
    values = torch.arange(12.0).to("tpu")

    @torch.tpu.spmd
    def masked(bound):
        kept = values[values > bound]
        mean = kept.mean() + kept.square().sum()
        dist.all_reduce(mean)
        return mean * 2

    for step in range(12):
        bound = lambda rank: (step * (1 + 3 * rank)) % 7 if step > 4 else 2
        wholes = [torch.arange(12.0)[torch.arange(12.0) > bound(each)] for each in range(world)]
        expected = 2 * sum(whole.mean() + whole.square().sum() for whole in wholes)
        torch.testing.assert_close(masked(bound(rank)).cpu(), expected, rtol=1e-6, atol=0)

    # Operations of the rank's own between collectives.
    @torch.tpu.spmd
    def differing(x):
        dist.all_reduce(x)
        y = (x * 2).sin() if rank == 0 else x.exp() - 3
        dist.all_reduce(y)
        return y * 2

    for step in range(5):
        x = torch.arange(3.0) + step + rank
        whole = sum(torch.arange(3.0) + step + each for each in range(world))
        expected = 2 * ((whole * 2).sin() + (world - 1) * (whole.exp() - 3))
        torch.testing.assert_close(differing(x.to("tpu")).cpu(), expected, rtol=1e-5, atol=0)
    dist.all_gather_object(every, differing.digests)
    assert [one == other for one, other in zip(*every)] == [True, False, True], every

    # Lengths of the rank's own, which change without a read: only what differs is compiled again.
    @torch.tpu.spmd
    def lengths(x):
        total = (x.square() + 1).sum()
        dist.all_reduce(total)
        return total.sqrt()

    seen = set()
    for step in range(10):
        long = [torch.arange(5.0 + (step * (each + 2)) % 4 + 4 * each) for each in range(world)]
        expected = sum((each.square() + 1).sum() for each in long).sqrt()
        torch.testing.assert_close(lengths(long[rank].to("tpu")).cpu(), expected, rtol=1e-6, atol=0)
        seen.add(lengths.digests[-1])
    assert len(seen) == 1, seen
    print(torch.tpu.fallback_stats())
    dist.destroy_process_group()
"""


def test_a_start_is_constant_where_all_ranks_agree_and_an_input_where_ranks_or_steps_differ():
    ranks = run_ranks(STARTS, 2, timeout=120)
    assert_all_ended_well(ranks)
    for each in ranks:
        assert each.stdout.splitlines()[-1] == "{}"


READERS = """
    # What a link with collectives takes, and whether it is launched at all, must not depend on what a rank
    # has around them. Rank 0 gathers one value three times, rank 1 three padded ones; rank 0 gathers a view.
    # Then rank 1 reads what nobody has written. Then its part is empty.
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    from tpu_backend.runtime.chain import Chain

    meshes = {device: init_device_mesh(device, (world,)) for device in ("cpu", "tpu")}
    make_link, twice = Chain.link, []

    def checked_link(*given):
        link = make_link(*given)
        twice.extend(value for value in link.inputs if link.inputs.count(value) > 1)
        assert not any(gives and value in twice for gives, value in zip(link.is_donated, link.inputs))
        return link

    Chain.link = checked_link

    def gathers_again(x, part):
        flipped = x.flip(1)
        twice = torch.cat([flipped, flipped])
        whole = flipped.full_tensor().clone()
        dist.all_reduce(whole)
        return twice, x.amax(2).cumsum(1), whole

    def gathers_a_view(x, part):
        flat = x.reshape(x.shape[0], -1)
        return [flat.t() @ flat]

    def reads_what_nobody_wrote(x, part):
        nothing = torch.zeros_like(part) if part.device.type == "cpu" else torch.empty_like(part)
        own = part if rank == 0 else nothing.mul_(1)
        total = own * 2
        dist.all_reduce(total)
        again = total.clone() if rank == 0 else own * 3
        dist.all_reduce(again)
        return total, again

    def gathers_what_it_updates(x, part):
        whole = torch.empty(4 * world, device=part.device)
        dist.all_gather_into_tensor(whole, part if rank == 0 else part * 1)
        part.add_(whole[:4].sum())
        return whole, part.clone()

    def returns_an_empty_part(x, part):
        total = part.clone()
        dist.all_reduce(total)
        return [x.softmax(-1) * 2]

    functions = gathers_again, gathers_a_view, reads_what_nobody_wrote, gathers_what_it_updates
    for function in (*functions, returns_an_empty_part):
        step = torch.tpu.spmd(function)
        for rows in (2 * world, 2 * world, 2 * world, 2 * world - 1, 2 * world - 1, 1, 1):
            values = torch.rand(rows, 6, rows, generator=torch.Generator().manual_seed(rows))
            results = {}
            for device, call in {"cpu": function, "tpu": step}.items():
                shards = distribute_tensor(values.to(device), meshes[device], [Shard(0)])
                found = call(shards, torch.arange(4.0, device=device))
                results[device] = [
                    each.full_tensor() if isinstance(each, DTensor) else each for each in found
                ]
            for own, expected in zip(results["tpu"], results["cpu"], strict=True):
                torch.testing.assert_close(own.cpu(), expected)
        if function is gathers_what_it_updates:  # a program takes the tensor twice, and donates it on no rank
            assert bool(twice) == (rank == 0)
        twice.clear()
    print(torch.tpu.fallback_stats())
    dist.destroy_process_group()
"""


def test_ranks_launch_the_same_links_whatever_each_has_around_them():
    ranks = run_ranks(READERS, 2, timeout=120, GROUP_TIMEOUT="20", GROUP_BACKEND="cpu:gloo,tpu:tpu")
    assert_all_ended_well(ranks)
    for each in ranks:
        assert each.stdout.splitlines()[-1] == "{}"


DIFFERING = """
    x = torch.ones(6, device="tpu")

    @torch.tpu.spmd
    def step(number):
        start = 1 if os.environ["KIND"] == "start" and number == 6 and rank == 1 else 0
        y = x[start : start + 4] * 3
        dist.all_reduce(y)
        if os.environ["KIND"] == "read" and number == 1 and rank == 1:
            y.tolist()
        z = y + 1
        dist.all_reduce(z)
        return z

    for number in range(9):
        step(number).cpu()
"""


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (
            "read",
            r"ranks differ in collective 2 of a region: rank 0 calls tpu_collective::all_reduce.*, first at "
            r"<string>:\d+.*; rank 1 has no more than 1: all ranks must make the same collectives",
        ),
        (
            "start",
            r"different things: .*operations or shapes are new to it: 4 operations, launched at .*, where "
            r"aten::mul.Tensor, first at <string>:\d+.*, reads a slice from element 1 instead of 0: a start "
            r"that moves on some ranks alone must do so within the first 3 calls, or be a tensor",
        ),
    ],
)
def test_ranks_that_differ_where_they_must_not_are_told_so(kind: str, said: str):
    ranks = run_ranks(DIFFERING, 2, timeout=60, KIND=kind, GROUP_TIMEOUT="20")
    for each in ranks:
        assert each.code == 1
        assert re.search(said, each.stderr), each.stderr[-3000:]
