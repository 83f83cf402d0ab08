"""A part of PyTorch's own distributed tests on two ranks, and that the runner sees what goes wrong."""

import textwrap
from pathlib import Path

import pytest

from tests.upstream.one_file import find, run_file
from tests.upstream.report import known_failures, name_of, surprises

FILE = "distributed_test.py"
EVERYDAY = {
    "test_all_gather_into_cat_tensor_cuda": "passed",
    "test_all_reduce_sum_cuda_async": "passed",
    "test_all_to_all_single_unequal_split_cuda": "passed",
    "test_batch_isend_irecv_self_nccl": "passed",
    "test_coalescing_manager": "passed",
    "test_ddp_hook_parity_allreduce_process_group": "passed",
    "test_sync_bn_logged": "passed",
    "test_send_recv_nccl_autograd_profiler": "passed",
    "test_isend": "skipped",
    "test_get_backend": "failed",
}


def test_a_part_of_them_does_what_is_known():
    rows = list(run_file(FILE, 2, list(EVERYDAY)))
    assert {name_of(row): row["outcome"] for row in rows} == EVERYDAY, rows
    assert surprises(rows) == []


def test_the_runner_sees_failures_skips_and_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    text = """
        import time
        import torch
        import torch.distributed as dist
        from torch.testing._internal.common_distributed import MultiProcessTestCase, skip_if_lt_x_gpu

        class Mine(MultiProcessTestCase):
            def test_a_sum(self):
                t = torch.full((2,), float(self.rank), device=f"cuda:{self.rank}")
                dist.all_reduce(t)
                self.assertEqual(t.cpu().tolist(), [1.0, 1.0])
                self.assertEqual(t.device.type, "tpu")

            @skip_if_lt_x_gpu(3)
            def test_more_devices(self):
                raise AssertionError

            def test_one_rank_raises(self):
                if self.rank == 1:
                    raise ValueError("mine")
                dist.all_reduce(torch.ones(1).cuda())

            def test_that_hangs(self):
                time.sleep(60)
    """
    (tmp_path / "mine.py").write_text(textwrap.dedent(text))
    monkeypatch.setenv("PYTORCH_TESTS", str(tmp_path))
    rows = list(run_file("mine.py", 2, ["test_a_sum", "test_more_devices", "test_one_rank_raises"]))
    assert [row["outcome"] for row in rows] == ["passed", "skipped", "failed"], rows
    assert rows[2]["why"] == "rank 1: ValueError: mine"
    assert surprises(rows) == ["mine.py: test_one_rank_raises failed: rank 1: ValueError: mine"]
    (row,) = run_file("mine.py", 2, ["test_that_hangs"], seconds=1)
    assert (row["outcome"], row["why"].partition(": ")[2]) == ("failed", "not done after 1 s")


def test_a_file_that_is_nowhere_says_where_it_was_looked_for(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTORCH_TESTS", "/nowhere")
    with pytest.raises(
        FileNotFoundError, match=r"nothing.py is in none of /nowhere, .*distributed: set PYTORCH"
    ):
        find("nothing.py")


def test_a_known_failure_that_passes_is_a_surprise():
    name = next(iter(known_failures(FILE)))
    assert len(surprises([{"file": FILE, "test": f"Class.{name}", "outcome": "passed", "why": ""}])) == 1
