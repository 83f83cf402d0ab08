"""What one rank does wrong, all ranks are told: which rank, what, at which line, and none of them hangs."""

import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests.backend.distributed.ranks import Rank, run_ranks

TIMEOUT = 6

FAULTS = """
    kind = os.environ["KIND"]
    x = torch.ones(4, device="tpu")
    for _ in range(3):
        dist.all_reduce(x)
    dist.barrier()
    print("ready", flush=True)
    started = time.monotonic()

    def go_on():
        for _ in range(400):
            dist.all_reduce(x)
            x.tolist()
            time.sleep(0.05)

    model = torch.nn.Linear(4, 4, device="tpu")

    @torch.tpu.spmd
    def step(number, given):
        loss = model(given).square().mean()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        if rank == 1 and kind == f"raises in step {number} of a region":
            raise ValueError("my own mistake")
        dist.all_reduce(loss)
        if rank == 1 and kind == f"one more in step {number} of a region":
            dist.all_reduce(loss, dist.ReduceOp.MAX)
        return loss

    def fault():
        if "of a region" in kind:
            for number in range(400):
                is_other = kind == "shape of a region" and rank == 1 and number == 9
                step(number, torch.ones(3 if is_other else 4, 4, device="tpu"))
        if kind == "raises" and rank == 1:
            raise ValueError("my own mistake")
        if kind == "index" and rank == 1:
            torch.zeros(3, device="tpu")[torch.tensor([7], device="tpu")].tolist()
        if kind == "shape":
            dist.all_reduce(torch.ones(4 + rank, device="tpu"))
        if kind == "dtype":
            dist.all_reduce(torch.ones(4, device="tpu", dtype=torch.int32 if rank else torch.float32))
        if kind == "reduction":
            dist.all_reduce(torch.ones(4, device="tpu"), dist.ReduceOp.MAX if rank else dist.ReduceOp.SUM)
        if kind == "operation":
            dist.broadcast(x, 0) if rank else dist.all_reduce(x)
        if kind == "order":
            a, b = torch.ones(5, device="tpu"), torch.ones(6, device="tpu")
            for each in (a, b):
                dist.all_reduce(each)
            for each in (a, b) if rank else (b, a):
                dist.all_reduce(each)
        if kind == "groups":  # of the same ranks
            groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
            for each in reversed(groups) if rank else groups:
                dist.all_reduce(torch.ones(4, device="tpu"), group=each)
        if kind == "tags":
            for tag in (2, 1) if rank else (1, 2):
                (dist.recv if rank else dist.send)(torch.ones(4, device="tpu"), 1 - rank, tag=tag)
        if kind == "both send first":
            for each in (dist.send, dist.recv):
                each(torch.ones(4, device="tpu"), 1 - rank)
        if kind == "a send against a collective":
            calls = [lambda: dist.all_reduce(x), lambda: (dist.send if rank else dist.recv)(x, 1 - rank)]
            for each in reversed(calls) if rank else calls:
                each()
        if kind == "splits":
            into = torch.empty(2 + 4 * rank, device="tpu")
            dist.all_to_all_single(into, torch.ones(4, device="tpu"), [1, 1] if rank == 0 else [4, 2], [1, 3])
        if kind == "swapped":  # two calls that have both followed the one before, and then the script ends
            a, b = torch.ones(4, device="tpu"), torch.ones(4, device="tpu")
            both = (lambda: dist.all_reduce(a), lambda: dist.broadcast(b, 0))
            for which in (0, 1, 0, 0, 1, 1, 0):
                both[which]()
            for which in (0, 1) if rank else (1, 0):
                both[which]()
            return
        if kind == "ended" and rank == 1:
            sys.exit(0)
        if kind == "missing" and rank == 1:
            time.sleep(20)
            return
        if kind == "killed" and rank == 0:
            os.kill(os.getpid(), 9)
        if kind == "stopped" and rank == 1:
            os.kill(os.getpid(), 19)
        go_on()

    try:
        fault()
    except BaseException:
        print(f"{time.monotonic() - started:.1f}", flush=True)
        raise
"""

# By rank: what the last line of its standard error says, of the processes' numbers; None: nothing is asked.
SAYINGS = {
    "raises": (r"rank 1 \(process {1} on .*\) failed: ValueError: my own mistake", "my own mistake"),
    **dict.fromkeys(
        ("raises in step 0 of a region", "raises in step 9 of a region"),
        (r"rank 1 \(process {1} on .*\) failed: ValueError: my own mistake", "ValueError: my own mistake"),
    ),
    "one more in step 0 of a region": (
        r"differ in collective 4 of a region: rank 0 has no more than 3; rank 1 calls tpu_.*all_reduce",
        r"differ in collective 4 of a region: rank 0 has no more than 3; rank 1 calls tpu_.*all_reduce",
    ),
    "one more in step 9 of a region": (
        r"rank 1 calls a region .* are new to it: .*, the first new one is number \d+, tpu_.*all_reduce",
        r"rank 0 calls a region's program of \d+ operations",
    ),
    "shape of a region": (
        r"rank 1 calls a region .* are new to it: .*, the first new one is number 1, tpu::linear.*\[3, 4\]",
        r"rank 0 calls a region's program of \d+ operations",
    ),
    "index": (r"rank 1 \(process {1} on .*\) failed: IndexError: index 7 is out", r"at <string>:\d+"),
    "shape": (
        r"different things: .*Float\[4\], sum\), first at <string>:\d+",
        r"different things: .*Float\[5\]",
    ),
    "dtype": (r"different things: .*Int\[4\]", r"different things: .*Float\[4\]"),
    "reduction": (r"different things: .*, max\)", r"different things: .*, sum\)"),
    "operation": (r"different things: .*broadcast", r"different things: .*all_reduce"),
    "order": (r"different things: .*Float\[5\]", r"different things: .*Float\[6\]"),
    "groups": (
        r"different things: .*sum\) in group 3 of ranks 0,1",
        r"different things: .*in group 2 of ranks",
    ),
    "tags": (r"different things: .*from rank 0 to rank 1, tag [12]\)", r"different things: .*tag [12]\)"),
    "both send first": (
        r"different things: .*from rank 1 to rank 0\)",
        r"different things: .*from rank 0 to rank 1\)",
    ),
    "a send against a collective": (r"different things: .*send\(", r"different things: .*all_reduce\("),
    "splits": (
        r"rank 1 \(process {1} on .*\) failed: ValueError: all_to_all: rank 0 sends 3 elements to rank 1",
        r"ValueError: all_to_all: rank 0 sends 3 elements to rank 1, which expects 4: the output",
    ),
    "swapped": (r"different things: .*broadcast", r"different things: .*all_reduce"),
    "ended": (r"rank 1 has ended, and has not called all_reduce\(Float\[4\], sum\)", None),
    "missing": (
        r"not done after 6 s: rank 1 has not called it; its last was all_reduce.* at <string>:",
        None,
    ),
    "killed": (None, r"rank 0 \(process {0} on .*\) has ended without a word"),
    "stopped": (r"not done after 6 s: rank 1 has not called it", None),
}


@pytest.mark.parametrize("kind", SAYINGS)
def test_a_fault_is_named_on_every_rank(kind: str):
    def end_stopped(ranks: list[Rank]) -> None:
        if kind == "stopped":
            ranks[0].process.wait(60)
            ranks[1].process.send_signal(signal.SIGKILL)

    ranks = run_ranks(FAULTS, 2, timeout=60, meanwhile=end_stopped, KIND=kind, GROUP_TIMEOUT=str(TIMEOUT))
    pids = [each.process.pid for each in ranks]
    for each, saying in zip(ranks, SAYINGS[kind], strict=True):
        assert "ready" in each.stdout, each.stderr
        if saying is None:
            continue
        assert each.code == 1, each.stderr
        last = each.last_line
        assert re.search(saying.format(*pids), last), f"{saying!r} is not in {last!r}"
        if kind != "swapped":  # found at exit
            assert float(each.stdout.split()[-1]) < TIMEOUT + 5
        assert each.seconds < 2 * TIMEOUT + 10


def test_a_region_that_raises_has_no_values_and_can_be_called_again() -> None:
    script = """
        x, made = torch.ones(2, device="tpu"), []

        @torch.tpu.spmd
        def step(fails):
            made.append(x + 1)
            dist.all_reduce(x)
            if fails:
                raise KeyError("mine")
            return x

        assert step(False).tolist() == [2, 2]
        try:
            step(True)
        except KeyError:
            print("caught", flush=True)
        for each in (x, made[-1]):
            try:
                print(each.tolist())
            except RuntimeError as error:
                print("has no value" in str(error) and "step raised KeyError" in str(error))
        x.fill_(1)
        assert step(False).tolist() == [2, 2]
    """
    for each in run_ranks(script, 2):
        assert (each.code, each.stdout.split()) == (0, ["caught", "True", "True"]), each.stderr


def test_a_long_wait_is_told_before_it_ends() -> None:
    script = """
        from tpu_backend.distributed import peers

        peers._LONG_WAIT = 2
        time.sleep(5 * rank)
        dist.all_reduce(torch.ones(4, device="tpu"))
    """
    waiting, late = run_ranks(script, 2)
    assert (waiting.code, late.code) == (0, 0), waiting.stderr + late.stderr
    told = r"tpu: all_reduce.*: not done after 2 s: rank 1 has called nothing in this group; waits until 60 s"
    assert re.search(told, waiting.stderr), waiting.stderr
    assert "not done" not in late.stderr


def test_all_ranks_end_soon_and_leave_no_process():
    def note_children(ranks: list[Rank]) -> None:
        while not _services(ranks) and ranks[0].process.poll() is None:
            time.sleep(0.1)
        services.extend(_services(ranks))

    services: list[int] = []
    script = """
        dist.all_reduce(torch.ones(2, device="tpu"))
        time.sleep(2 - rank)  # in another order than they came
        print(time.time(), flush=True)
    """
    ranks = run_ranks(script, 2, meanwhile=note_children)
    assert [each.code for each in ranks] == [0, 0], ranks[0].stderr + ranks[1].stderr
    assert time.time() - max(float(each.stdout.split()[-1]) for each in ranks) < 10
    assert len(services) == 1
    deadline = time.monotonic() + 15
    while _is_alive(services[0]):
        assert time.monotonic() < deadline, "the service outlives its ranks"
        time.sleep(0.1)


def _services(ranks: list[Rank]) -> list[int]:
    """Children of these processes that are none of the ranks."""
    parents = {each.process.pid for each in ranks}
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                parent = int(_status(int(entry))[1])
                is_service = b"service.py" in Path(f"/proc/{entry}/cmdline").read_bytes()
            except OSError:
                continue
            if is_service and parent in parents:
                found.append(int(entry))
    return found


def _status(pid: int) -> list[str]:
    """Its state, its parent, and so on."""
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()


def _is_alive(pid: int) -> bool:
    try:
        return _status(pid)[0] != "Z"
    except OSError:
        return False
