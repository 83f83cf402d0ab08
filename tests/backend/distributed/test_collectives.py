"""Each collective on the device gives what PyTorch's gloo backend gives on the CPU, to the bit."""

import pytest

from tests.backend.distributed.ranks import assert_all_ended_well, run_ranks

COLLECTIVES = """
    from torch.distributed import ReduceOp

    def same(name, run, *made):
        results = []
        for device in ("cpu", "tpu"):
            tensors = [each.clone().to(device) for each in made]
            outcome = run(*tensors)
            results.append([each.cpu() for each in ([*outcome] if outcome is not None else tensors)])
        for expected, got in zip(*results, strict=True):
            bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
            assert expected.dtype == got.dtype and expected.shape == got.shape, name
            if expected.dtype.is_complex:
                expected, got = torch.view_as_real(expected), torch.view_as_real(got)
            as_bits = bits[expected.element_size()]
            assert torch.equal(expected.contiguous().view(as_bits), got.contiguous().view(as_bits)), (
                f"{name} on rank {rank}: {got}, expected {expected}"
            )
        done.append(name)

    def random(*shape, dtype=torch.float32, seed=0):
        generator = torch.Generator().manual_seed(100 * seed + rank)
        values = torch.randint(-4, 5, shape, generator=generator)
        return values.to(dtype) if dtype != torch.bool else values > 0

    done = []
    FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
    INTEGERS = (torch.int64, torch.int32, torch.int8, torch.uint8)
    # Small integers: their sums are exact, so that no order of the sum shows.
    for dtype in (*FLOATS, *INTEGERS):
        for op in ("SUM", "PRODUCT", "MIN", "MAX"):
            reduce = getattr(ReduceOp, op)
            x = random(3, 5, dtype=dtype)
            same(f"all_reduce {op} {dtype}", lambda t: dist.all_reduce(t, reduce), x)
    for dtype in INTEGERS:
        for op in ("BAND", "BOR", "BXOR"):
            reduce = getattr(ReduceOp, op)
            same(f"all_reduce {op} {dtype}", lambda t: dist.all_reduce(t, reduce), random(7, dtype=dtype))
    for dtype in (*FLOATS, *INTEGERS, torch.bool, torch.complex64):
        x = random(2, 3, dtype=dtype)
        def gather(t):
            outputs = [torch.empty_like(t) for _ in range(world)]
            dist.all_gather(outputs, t)
            return outputs
        same(f"all_gather {dtype}", gather, x)
        same(f"broadcast {dtype}", lambda t: dist.broadcast(t, world - 1), x)
    odd = torch.tensor([-0.0, float("nan"), float("inf"), 1e-45, rank])
    odd.view(torch.int32)[1] = 0x7FC12345
    same("broadcast of odd values", lambda t: dist.broadcast(t, 1), odd)

    def into(t):
        output = torch.empty(world * t.size(0), *t.shape[1:], device=t.device)
        dist.all_gather_into_tensor(output, t)
        return [output]
    same("all_gather_into_tensor", into, random(3, 4))
    output = torch.empty(world, 3, device="tpu")
    dist.all_gather_into_tensor(output, torch.full((3,), float(rank), device="tpu"))
    assert output.tolist() == [[float(each)] * 3 for each in range(world)]
    same("all_gather_into_tensor of a view", into, random(4, 3).t())
    def uneven(t):
        outputs = [torch.empty(each + 1, device=t.device) for each in range(world)]
        dist.all_gather(outputs, t)
        return outputs
    if world == 2:  # gloo takes equal sizes only
        x = torch.arange(rank + 1.0).to("tpu")
        outputs = [torch.empty(each + 1, device="tpu") for each in range(world)]
        dist.all_gather(outputs, x)
        assert [each.tolist() for each in outputs] == [[0], [0, 1]]

    def scattered(t):
        output = torch.empty(t.size(0) // world, *t.shape[1:], device=t.device)
        dist.reduce_scatter_tensor(output, t)
        return [output]
    same("reduce_scatter_tensor", scattered, random(2 * world, 3))
    for op, expected in (("AVG", 0.5 * (world - 1)), ("SUM", world * (world - 1) / 2)):
        t = torch.full((5,), float(rank), device="tpu")
        dist.all_reduce(t, getattr(ReduceOp, op))
        assert t.tolist() == [expected] * 5, (op, t)
        output = torch.empty(2, device="tpu")
        whole = torch.full((2 * world,), float(rank), device="tpu")
        dist.reduce_scatter_tensor(output, whole, getattr(ReduceOp, op))
        assert output.tolist() == [expected] * 2, (op, output)
    t = torch.full((3,), float(rank + 1), device="tpu")
    dist.all_reduce(t, dist._make_nccl_premul_sum(0.5))
    assert t.tolist() == [0.5 * world * (world + 1) / 2] * 3

    def exchanged(t):
        output = torch.empty_like(t)
        dist.all_to_all_single(output, t)
        return [output]
    same("all_to_all_single", exchanged, random(2 * world, 3))
    def split(t):
        sizes = [rank + each for each in range(world)]
        output = torch.empty(sum(sizes), 2, device=t.device)
        dist.all_to_all_single(output, t, sizes, sizes)
        return [output]
    same("all_to_all_single, uneven", split, random(sum(rank + each for each in range(world)), 2))
    def listed(t):
        outputs = [torch.empty(2, device=t.device) for _ in range(world)]
        dist.all_to_all(outputs, list(t.chunk(world)))
        return outputs
    t = random(2 * world).to("tpu")
    assert torch.equal(torch.cat(listed(t)).cpu(), exchanged(t)[0].cpu())

    same("reduce", lambda t: dist.reduce(t, 1) or ([t] if rank == 1 else []), random(4))
    def gathered(t):
        outputs = [torch.empty_like(t) for _ in range(world)] if rank == 0 else None
        dist.gather(t, outputs, 0)
        return outputs or []
    same("gather", gathered, random(2, 2))
    def parts(t):
        output = torch.empty(3, device=t.device)
        dist.scatter(output, list(t.chunk(world)) if rank == 1 else None, 1)
        return [output]
    same("scatter", parts, random(3 * world))
    def passed(t):
        other = torch.empty_like(t)
        nxt, before = (rank + 1) % world, (rank - 1) % world
        both = [dist.P2POp(dist.isend, t, nxt), dist.P2POp(dist.irecv, other, before)]
        for each in dist.batch_isend_irecv(both):
            each.wait()
        return [other]
    same("batch_isend_irecv in a ring", passed, random(5))
    def sent(t):
        if rank == 0:
            dist.send(t, 1)
        elif rank == 1:
            dist.recv(t, 0)
        return [t]
    same("send and recv", sent, random(4))
    for shape in ((0,), (2, 0), ()):
        same(f"all_reduce of {shape}", dist.all_reduce, random(*shape))
        same(f"broadcast of {shape}", lambda t: dist.broadcast(t, 0), random(*shape))

    # First: PyTorch names a split by how many groups its rank has, which must be equally many.
    dist.group.WORLD.bound_device_id = torch.device("tpu", 0)
    pair = dist.split_group(split_ranks=[[0, 1]])
    if rank < 2:
        t = torch.full((2,), float(rank + 1), device="tpu")
        dist.all_reduce(t, group=pair)
        assert t.tolist() == [3.0] * 2
        assert (dist.get_rank(pair), dist.get_world_size(pair)) == (rank, 2)
    else:
        is_newer = hasattr(torch, "bcomplex32")  # than torch 2.13
        assert pair == (dist.GroupMember.NON_GROUP_MEMBER if is_newer else None)

    some = dist.new_group([0, 1])
    others = dist.new_group([1, world - 1]) if world > 2 else None
    for group, members in ((some, [0, 1]), (others, [1, world - 1])):
        if group is not None and rank in members:
            t = torch.full((2,), float(rank), device="tpu")
            dist.all_reduce(t, group=group)
            assert t.tolist() == [float(sum(members))] * 2

    a, b = torch.full((2,), 1.0, device="tpu"), torch.full((3, 2), float(rank), device="tpu")
    with dist._coalescing_manager(device=torch.device("tpu")):
        dist.all_reduce(a)
        dist.all_reduce(b)
    assert (a.tolist(), b.tolist()) == ([world] * 2, [[sum(range(world))] * 2] * 3)
    dist.all_reduce_coalesced([a, b], ReduceOp.MAX)
    assert a.tolist() == [world] * 2

    import torch.distributed._functional_collectives as functional
    everybody = dist.group.WORLD
    def functionals(t):
        rows = t.repeat(world, 1)
        listed = [t, t + 1]
        return [
            functional.all_reduce(t, "sum", everybody),
            functional.all_gather_tensor(t, 0, everybody),
            functional.reduce_scatter_tensor(rows, "sum", 0, everybody),
            functional.all_to_all_single(rows, None, None, everybody),
            functional.broadcast(t, 1, everybody),
            *functional.all_reduce_coalesced(listed, "max", everybody),
            *functional.all_gather_into_tensor_coalesced(listed, everybody),
        ]
    same("functional collectives", functionals, random(2, 3))
    rows = torch.full((2 * world, 3), float(rank), device="tpu")
    mean = functional.reduce_scatter_tensor(rows, "avg", 0, everybody)
    assert mean.tolist() == [[(world - 1) / 2] * 3] * 2
    rows = torch.ones(world, device="tpu")
    (part,) = functional.reduce_scatter_tensor_coalesced([rows], "sum", [0], everybody)
    assert part.tolist() == [world]

    objects = [None] * world
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": each} for each in range(world)]
    work = dist.all_reduce(torch.ones(3, device="tpu"), async_op=True)
    assert work.wait()
    assert work.get_future().value()[0].tolist() == [world] * 3
    assert work.is_completed()
    large = torch.full((2 * 2**20,), float(rank + 1))  # 8 MiB
    same("all_reduce of 8 MiB", dist.all_reduce, large)
    same("reduce_scatter of 8 MiB", scattered, large[: len(large) // world * world])
    dist.barrier()
    print(len(done), torch.tpu.fallback_stats())
    dist.destroy_process_group()
"""


@pytest.mark.parametrize("world_size", [2, 3])
def test_collectives_give_what_gloo_gives(world_size: int):
    ranks = run_ranks(COLLECTIVES, world_size, timeout=300, GROUP_BACKEND="cpu:gloo,tpu:tpu")
    assert_all_ended_well(ranks)
    for each in ranks:
        assert each.stdout.endswith(" {}\n"), each.stdout  # nothing ran on the CPU
