"""A rank ends with its own exit code, and the launcher is told that of the rank that failed first."""

import subprocess
import sys
import textwrap

import pytest

from tests.backend.distributed.ranks import PROLOGUE, environment_of_ranks, run_ranks
from tests.backend.fresh_process import ROOT

TIMEOUT = 6

ENDS = """
    kind = os.environ["KIND"]
    x = torch.ones(4, device="tpu")
    for _ in range(2):  # the first call after a barrier waits for nobody from now on
        dist.all_reduce(x)
        dist.all_reduce(x)
        dist.barrier()

    def go_on():
        for _ in range(100):
            dist.all_reduce(x)
            x.tolist()
            time.sleep(0.05)

    if kind == "exit code":  # of a rank that is told of a peer's error
        if rank == 1:
            raise SystemExit(5)
        try:
            go_on()
        except RuntimeError as error:
            assert "rank 1 has ended" in str(error), error
            raise SystemExit(3)
    if kind == "caught":
        if rank == 1:
            raise ValueError("my own mistake")
        try:
            go_on()
        except RuntimeError as error:
            assert "my own mistake" in str(error), error
    if kind == "late":  # a caught timeout, and all is well again
        if rank == 1:
            time.sleep(3)
        try:
            dist.all_reduce(x, async_op=True).wait(timedelta(seconds=1))
        except RuntimeError as error:
            assert rank == 0 and "not done after 1 s: rank 1" in str(error), error
        else:
            assert rank == 1
        dist.all_reduce(x)
        assert x.tolist() == [64.0] * 4
    if kind == "stuck":  # a caught timeout of a launched program, and nothing comes after it
        if rank == 1:
            time.sleep(8)
            raise SystemExit(7)
        try:
            dist.all_reduce(x, async_op=True).wait(timedelta(seconds=1))
        except RuntimeError as error:
            assert "not done after 1 s: rank 1" in str(error), error
    if kind == "finished":  # before a peer failed
        x.tolist()
        dist.barrier()
        if rank == 1:
            raise ValueError("later")
        time.sleep(1)
    if kind == "unnoticed":  # what is found at exit does not hide an exit code
        a, b = torch.ones(4, device="tpu"), torch.ones(4, device="tpu")
        both = (lambda: dist.all_reduce(a), lambda: dist.broadcast(b, 0))
        for which in (0, 1, 0, 0, 1, 1, 0):
            both[which]()
        for which in (0, 1) if rank else (1, 0):
            both[which]()
        raise SystemExit(4 * rank)
"""


@pytest.mark.parametrize(
    ("kind", "codes"),
    [
        ("exit code", [3, 5]),
        ("caught", [0, 1]),
        ("late", [0, 0]),
        ("stuck", [0, 7]),
        ("finished", [0, 1]),
        ("unnoticed", [1, 4]),
    ],
)
def test_a_rank_ends_with_its_own_exit_code(kind: str, codes: list[int]) -> None:
    ranks = run_ranks(ENDS, 2, timeout=60, KIND=kind, GROUP_TIMEOUT=str(TIMEOUT))
    assert [each.code for each in ranks] == codes, ranks[0].stderr + ranks[1].stderr


FIRST = """
    x = torch.ones(4, device="tpu")
    dist.all_reduce(x)
    if rank == 1:
        time.sleep(0.2)
        raise SystemExit(3)
    for _ in range(100):
        dist.all_reduce(x)
        x.tolist()
"""


def test_the_launcher_reports_the_exit_code_of_the_first_error(tmp_path) -> None:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(PROLOGUE) + textwrap.dedent(FIRST))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0"]
    ended = subprocess.run(
        [*launcher, "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", str(script)],
        env=environment_of_ranks(),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    cause = ended.stdout[ended.stdout.index("Root Cause") :]
    assert "exitcode  : 3" in cause, ended.stdout
    assert "rank      : 1" in cause, ended.stdout
