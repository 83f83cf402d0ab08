"""Ctrl-C, SIGTERM and `timeout` at runs whose batches are made by processes: all end in a checkpoint."""

import multiprocessing
import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from tests.tputrain.interrupting import Try, main
from tputrain.signals import SignalWatch
from tputrain.worker_signals import left_to

TRIES = [
    Try(("fork",), "started", sender="timeout"),
    Try(("fork", "persistent"), "evaluating", number=signal.SIGTERM),
    Try(("fork",), "saving", sender="twice"),
    Try(("spawn", "persistent", "late"), "evaluating", 2.0),
    Try(("spawn", "persistent"), "stepping", number=signal.SIGTERM, sender="timeout"),
    Try(("fork", "slow"), "started", 1.0),
]


@pytest.mark.slow
def test_a_signal_to_the_whole_group_ends_a_run_with_workers_in_a_checkpoint(tmp_path):
    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(one.problems, tmp_path / str(number)) for number, one in enumerate(TRIES)]
        assert [run.result() for run in runs] == [[] for _ in TRIES]


@pytest.mark.sweep
def test_a_signal_at_any_moment_ends_a_run_in_a_checkpoint(tmp_path):
    assert main(tries=40, seed=0, directory=tmp_path) == 0


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_leave_signals_to_their_parent_and_end_when_it_asks_them_to(method):
    loader = DataLoader(TensorDataset(torch.arange(64)), num_workers=1, multiprocessing_context=method)
    with SignalWatch() as watch, left_to(watch):
        batches = iter(loader)
        next(batches)
        (worker,) = batches._workers
        for number in (signal.SIGINT, signal.SIGTERM):
            sender = multiprocessing.get_context("fork").Process(target=os.kill, args=(worker.pid, number))
            sender.start()
            sender.join()
        assert len(list(batches)) == 63
        assert worker.exitcode == 0
        batches = iter(loader)
        next(batches)
        (worker,) = batches._workers
        worker.terminate()
        worker.join(60)
        assert worker.exitcode == 0
    assert loader.worker_init_fn is None
