"""Batches made by other processes, ahead of the steps that ask for them."""

from collections.abc import Iterator
from itertools import count

import torch
from torch.utils.data import DataLoader, Dataset

from tputrain.batches import Batch
from tputrain.feed import IndexedLoader
from tputrain.worker_death import deaths_named


class WorkerBatches:
    """An indexed loader whose `batch_at` is called by `workers` processes, two batches each ahead of its use.

    The batches are the loader's own, in every bit. Asked for another than the next one, it begins anew from
    there. The loader is pickled to the processes, which are spawned, not forked: JAX has threads.
    """

    def __init__(self, loader: IndexedLoader, micro_batches: int, workers: int):
        self.loader = loader
        self.fingerprint = getattr(loader, "fingerprint", None)
        self.epochs_at = getattr(loader, "epochs_at", None)
        self.lengths = getattr(loader, "lengths", ())
        self._micro_batches, self._workers = micro_batches, workers
        self._place = -1
        self._iterator: Iterator[Batch] = iter(())

    def batch_at(self, step: int, micro: int) -> Batch:
        """Micro-batch `micro` of step `step`. Raises DataWorkerError where a process died."""
        place = step * self._micro_batches + micro
        with deaths_named():
            if place != self._place:
                self._iterator = iter(self._loader_from(place))
            self._place = place + 1
            return next(self._iterator)

    def _loader_from(self, place: int) -> DataLoader:
        return DataLoader(
            _Places(self.loader, self._micro_batches),
            batch_size=None,
            sampler=count(place),
            num_workers=self._workers,
            multiprocessing_context="spawn",
            # Else it would draw from PyTorch's own generator, and dropout would differ with it.
            generator=torch.Generator(),
        )


class _Places(Dataset):
    """An indexed loader's micro-batches, numbered through."""

    def __init__(self, loader: IndexedLoader, micro_batches: int):
        self.loader, self.micro_batches = loader, micro_batches

    def __getitem__(self, place: int) -> Batch:
        return self.loader.batch_at(*divmod(place, self.micro_batches))
