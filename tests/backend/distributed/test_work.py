"""Waiting for a collective: what `Work` tells, who waits for the device, and how an abort ends it."""

import re

import pytest

from tests.backend.distributed.ranks import assert_all_ended_well, run_ranks

IS_COMPLETED = """
    def poll(work):
        deadline = time.monotonic() + 60
        while not work.is_completed():
            assert time.monotonic() < deadline, "never completed"
            time.sleep(0.01)

    @torch.tpu.spmd
    def step(x):
        t = x * 2
        poll(dist.all_reduce(t, async_op=True))
        return t + 1

    x = torch.ones(4, device="tpu")
    assert step(x).tolist() == [2.0 * world + 1] * 4
    t = torch.ones(5, device="tpu")
    for _ in range(3):
        poll(dist.all_reduce(t, async_op=True))
    if rank == 1:
        time.sleep(3)
    work = dist.all_reduce(t, async_op=True)
    begin = time.monotonic()
    is_completed = work.is_completed()
    assert time.monotonic() - begin < 2
    assert rank == 1 or not is_completed
    assert t.tolist() == [float(world**4)] * 5
"""


def test_a_work_tells_whether_it_is_done_and_does_not_wait():
    assert_all_ended_well(run_ranks(IS_COMPLETED, 2))


ALONE = """
    import threading
    from tpu_backend import jax_op

    compiling, recorded, armed, made = threading.Event(), threading.Event(), [], []

    @jax_op
    def compiled_slowly(x):
        if armed:
            compiling.set()
            assert recorded.wait(60)
        return x * 2

    def record():
        assert compiling.wait(60)
        made.append(z + 1)
        recorded.set()

    x, z = torch.ones(4, device="tpu"), torch.ones(3, device="tpu")
    dist.all_reduce(x)
    thread = threading.Thread(target=record)
    thread.start()
    made.append(compiled_slowly(z))
    torch.ones(7, device="tpu").tolist()  # cuts, unless it is done behind the next line
    torch.tpu.synchronize()
    before = torch.tpu.compile_stats()["segments_run"]
    made.append(compiled_slowly(z) - 1)
    armed.append(True)
    dist.all_reduce(x)
    thread.join()
    torch.tpu.flush()
    assert compiling.is_set()
    assert torch.tpu.compile_stats()["segments_run"] - before == 3
    assert x.tolist() == [float(world**2)] * 4
    assert [each.tolist() for each in made] == [[2.0] * 3, [1.0] * 3, [2.0] * 3]
"""


def test_nothing_that_another_thread_records_joins_the_program_of_a_collective():
    assert_all_ended_well(run_ranks(ALONE, 2))


THREADS = """
    import threading

    started, start = [], threading.Thread.start

    def count(thread):
        started.append(thread.name)
        start(thread)

    threading.Thread.start = count
    x = torch.ones(4, device="tpu")
    for _ in range(20):
        dist.all_reduce(x)
        x.tolist()
        torch.tpu.synchronize()
        x.tolist()
    assert started.count("tpu_wait") == 1, started
"""


def test_reads_start_no_threads():
    assert_all_ended_well(run_ranks(THREADS, 2))


PEER = """
    x = torch.ones(4, device="tpu")
    for _ in range(3):
        (dist.recv if rank else dist.send)(x, 1 - rank)
        dist.barrier()
    dist.barrier()
    if rank == 1:
        try:
            dist.irecv(x, 0).wait(timedelta(seconds=2))
        except RuntimeError as error:
            print(error, flush=True)
    else:
        time.sleep(10)
    os._exit(0)
"""


def test_a_receive_that_nobody_sends_to_says_so():
    ranks = run_ranks(PEER, 2)
    call = r"send\(Float\[4\], from rank 0 to rank 1\)"
    assert re.search(
        rf"{call} of ranks 0,1: not done after 2 s: rank 0 has not called it", ranks[1].stdout
    ), ranks[1].stdout + ranks[1].stderr


ABORTED = """
    import threading

    how = os.environ["HOW"]
    x = torch.ones(4, device="tpu")
    for _ in range(3):
        dist.all_reduce(x)
    y = torch.ones(4, device="tpu")
    WORLD = dist.group.WORLD
    region = torch.tpu.spmd(lambda: WORLD.allreduce([y]))
    for _ in range(5):  # its later launches wait for nobody
        region()
    x.tolist()
    if rank == 1:
        time.sleep(12)  # until the other one has been ended
        os._exit(0)
    work = dist.all_reduce(x, async_op=True)

    def abort():
        time.sleep(2)
        print(f"{time.monotonic():.2f}", flush=True)
        dist.distributed_c10d._abort_process_group()

    threading.Thread(target=abort).start()
    hows = {
        "wait": lambda: work.wait(timedelta(seconds=30)),
        "read": x.tolist,
        "synchronize": torch.tpu.synchronize,
    }
    try:
        hows[how]()
    except RuntimeError as error:
        print(f"{time.monotonic():.2f} {error}", flush=True)
    for call in (lambda: WORLD.allreduce([x]), region):
        try:
            call()
        except RuntimeError as error:
            print(f"{time.monotonic():.2f} {error}", flush=True)
    time.sleep(20)  # this thread hears nothing of it
"""


@pytest.mark.parametrize("how", ["wait", "read", "synchronize"])
def test_an_abort_wakes_who_waits_and_ends_a_process_whose_device_is_stuck(how: str):
    rank = run_ranks(ABORTED, 2, HOW=how)[0]
    aborted_at, waked, *refused = rank.stdout.splitlines()[-4:]  # gloo prints, too
    text = r"the group of ranks 0,1 was aborted by this rank, at <string>:\d+"
    for line in (waked, *refused):
        seconds, _, message = line.partition(" ")
        assert re.search(text, message), rank.stdout
        assert float(seconds) - float(aborted_at) < 3
    assert rank.code == 1
    assert re.search(text + ".*, and the device is stuck$", rank.last_line), rank.stderr


ABORTED_IDLE = """
    x = torch.ones(4, device="tpu")
    own = [dist.new_group([each]) for each in range(world)][rank]
    dist.all_reduce(x, group=own)
    own.abort()
    try:
        dist.all_reduce(x, group=own)
    except RuntimeError as error:
        print(error)
    dist.all_reduce(x)
    assert x.tolist() == [float(world)] * 4
    time.sleep(5)
"""


def test_other_groups_outlive_an_abort():
    ranks = run_ranks(ABORTED_IDLE, 2)
    assert_all_ended_well(ranks)
    for number, each in enumerate(ranks):
        assert re.match(rf"the group of ranks {number} was aborted by this rank, at <string>:", each.stdout)
