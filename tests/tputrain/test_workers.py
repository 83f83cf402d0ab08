"""Data workers: the same batches, and a dead one is named in one line."""

import errno
import os
import pickle
import signal

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data._utils import signal_handling

from tputrain import LogConfig, RunConfig, Trainer, TrainerConfig
from tputrain.callbacks.callback import Callback
from tputrain.data import DataConfig, PackedSequences, PaddedSequences
from tputrain.data.workers import WorkerBatches
from tputrain.worker_death import DataWorkerError, deaths_named


@pytest.fixture
def data(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("some words and then some more of them\n" * 300)
    cfg = DataConfig(files="text.txt", sequence_length=16, vocab_size=270, cache_dir="cache", workers=2)
    return cfg.build(0, announce=lambda line: None)


def equal(first: dict, second: dict) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


def test_batches_of_workers_are_the_loaders_own_from_any_step_on_and_a_dead_worker_is_named(data):
    loader = data.training_batches(4, 2)
    assert isinstance(loader, WorkerBatches)
    generator = torch.get_rng_state()
    for start in (0, 7):  # from a start, and after a resume
        for step in range(start, start + 5):
            for micro in range(2):
                assert equal(loader.batch_at(step, micro), data.train.batch_at(step, micro, 4, 2))
    assert torch.equal(torch.get_rng_state(), generator)
    assert loader.fingerprint == data.fingerprint
    worker = loader._iterator._workers[0]

    def die_and_go_on() -> None:
        os.kill(worker.pid, signal.SIGKILL)
        for step in range(12, 40):
            loader.batch_at(step, 0), loader.batch_at(step, 1)

    with pytest.raises(
        DataWorkerError, match=rf"^data worker \(pid {worker.pid}\) .*newest checkpoint"
    ) as caught:
        with deaths_named():
            die_and_go_on()
    assert "\n" not in str(caught.value)


class KillsAWorker(Callback):
    def __init__(self, loader):
        self.loader = loader

    def on_step_end(self, trainer: Trainer) -> None:
        if trainer.step == 3:
            os.kill(self.loader.iterator._workers[0].pid, signal.SIGKILL)


class Remembered(DataLoader):
    """A DataLoader that shows its iterator, and so its workers."""

    def __iter__(self):
        object.__setattr__(self, "iterator", super().__iter__())
        return self.iterator


def test_a_dead_worker_of_a_users_loader_ends_the_run_with_one_line(tmp_path):
    dataset = TensorDataset(torch.randn(4000, 4), torch.zeros(4000, dtype=torch.int64))
    loader = Remembered(dataset, batch_size=2, num_workers=1, multiprocessing_context="spawn")
    cfg = RunConfig(device="cpu", trainer=TrainerConfig(steps=1000), log=LogConfig(progress="none"))
    trainer = Trainer(nn.Linear(4, 2), cfg, train_loader=loader, callbacks=[KillsAWorker(loader)])
    with pytest.raises(DataWorkerError, match=r"^data worker \(pid \d+\) ") as caught:
        trainer.fit()
    assert "\n" not in str(caught.value)
    assert 3 <= trainer.step < 1000


def test_a_connection_that_breaks_before_the_death_is_known_is_told_as_the_death(monkeypatch):
    """The window between a dying process' closed sockets and the news of its end, held open."""
    loader = Remembered(TensorDataset(torch.zeros(64, 1)), num_workers=1, multiprocessing_context="spawn")
    iterator = iter(loader)
    next(iterator)
    (worker,) = loader.iterator._workers
    alive = iter([True, True])

    def broken(*args, **kwargs):
        raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))

    monkeypatch.setattr(signal_handling, "_error_if_any_worker_fails", lambda: None)  # its news come too late
    monkeypatch.setattr(iterator._data_queue, "get", broken)
    is_alive = worker.is_alive
    monkeypatch.setattr(worker, "is_alive", lambda: next(alive, None) or is_alive())
    os.kill(worker.pid, signal.SIGKILL)
    line = rf"^data worker \(pid {worker.pid}\) was killed by a signal \("
    with pytest.raises(DataWorkerError, match=line), deaths_named():
        next(iterator)


@pytest.mark.parametrize(
    ("said", "line"),
    [
        (
            "DataLoader worker (pid 12) is killed by signal: Killed. ",
            "pid 12) was killed by a signal (Killed)",
        ),
        ("DataLoader worker (pid(s) 3, 4) exited unexpectedly", "pid 3, 4) ended, killed or crashed"),
        (
            "DataLoader worker (pid 5) exited unexpectedly with exit code 1. Details are lost due to "
            "multiprocessing.",
            "pid 5) ended with exit code 1",
        ),
    ],
)
def test_whatever_pytorch_says_of_a_dead_worker_is_one_line(said, line):
    with pytest.raises(DataWorkerError) as caught, deaths_named():
        raise RuntimeError(said)
    assert line in str(caught.value)


def test_other_errors_are_left_as_they_are():
    with pytest.raises(RuntimeError, match=r"^shape mismatch$") as caught, deaths_named():
        raise RuntimeError("shape mismatch")
    assert type(caught.value) is RuntimeError


@pytest.mark.parametrize("kind", ["packed", "padded"])
def test_tokens_in_a_file_are_not_sent_to_a_worker(tmp_path, kind):
    np.save(tmp_path / "tokens.npy", np.arange(100_000, dtype=np.uint32))
    tokens = np.load(tmp_path / "tokens.npy", mmap_mode="r")
    offsets = np.arange(0, 100_001, 1000)
    if kind == "packed":
        sequences = PackedSequences(tokens, offsets, 50, 0, "train")
    else:
        sequences = PaddedSequences(tokens, offsets, 5000, 0, "train", padding_id=0, buckets=2)
    sent = pickle.dumps(sequences)
    assert len(sent) < 20_000
    assert equal(pickle.loads(sent).batch_at(2, 0, 4), sequences.batch_at(2, 0, 4))
    in_memory = PackedSequences(np.arange(60), np.array([0, 60]), 6, 0, "train")
    assert equal(pickle.loads(pickle.dumps(in_memory)).batch_at(1, 0, 2), in_memory.batch_at(1, 0, 2))


def test_workers_of_a_fork_server_give_their_batches():
    dataset = TensorDataset(torch.randn(16, 4), torch.zeros(16, dtype=torch.int64))
    loader = DataLoader(dataset, batch_size=4, num_workers=1, multiprocessing_context="forkserver")
    cfg = RunConfig(device="cpu", trainer=TrainerConfig(steps=3), log=LogConfig(progress="none"))
    trainer = Trainer(nn.Linear(4, 2), cfg, train_loader=loader)
    trainer.fit()
    assert trainer.step == 3
