"""A signal to the whole process group, as a terminal's Ctrl-C and `timeout` send it: data workers leave it to
the process that trains.

That process still needs batches to end its step, and a worker that dies of a signal may leave a lock behind
that its parent waits for.
"""

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing import resource_tracker
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from tputrain.signals import WATCHED, SignalWatch, is_watching

_InitFunction = Callable[[int], None]
_LOOK_EVERY = 5.0  # seconds
_NO_WORD = "ignore:resource_tracker:UserWarning"


@contextmanager
def left_to(watch: SignalWatch) -> Iterator[None]:
    """The workers of DataLoaders that are started in here leave SIGINT and SIGTERM to `watch`.

    Such a signal never reaches them: it is blocked as they are started, which a process inherits, and stays
    so. They end with their loader, when their parent asks them to, and soon after their parent has ended.
    """
    if not is_watching():  # in another thread than the main one
        yield
        return
    start = _MultiProcessingDataLoaderIter.__init__
    get = _MultiProcessingDataLoaderIter._try_get_data

    def start_quietly(iterator: Any, loader: DataLoader) -> None:
        with watch.unbroken(), _blocked(loader), _listening_to_their_parent(loader):
            start(iterator, loader)

    def get_unless_received(iterator: Any, *timeout: float) -> Any:
        watch.break_if_received()
        return get(iterator, *timeout)

    _MultiProcessingDataLoaderIter.__init__ = start_quietly  # type: ignore[assignment, method-assign]
    _MultiProcessingDataLoaderIter._try_get_data = get_unless_received  # type: ignore[method-assign]
    try:
        yield
    finally:
        _MultiProcessingDataLoaderIter.__init__ = start  # type: ignore[method-assign]
        _MultiProcessingDataLoaderIter._try_get_data = get  # type: ignore[method-assign]


@contextmanager
def _blocked(loader: DataLoader) -> Iterator[None]:
    """This thread gets none of these signals; another one does, so that this process misses nothing."""
    if _start_method(loader) != "fork":
        _start_tracker()  # which unblocks them
    before = signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start_tracker() -> None:
    """Have semaphores removed after this process has gone, without a word where it left at once."""
    sys.warnoptions.append(_NO_WORD)  # the tracker is started with the same ones
    try:
        resource_tracker.ensure_running()
    finally:
        sys.warnoptions.remove(_NO_WORD)


@contextmanager
def _listening_to_their_parent(loader: DataLoader) -> Iterator[None]:
    own = loader.worker_init_fn
    has_server = _start_method(loader) == "forkserver"  # whose children the workers are
    loader.worker_init_fn = partial(_begin, own, os.getpid(), not has_server)
    try:
        yield
    finally:
        loader.worker_init_fn = own


def _start_method(loader: DataLoader) -> str | None:
    return (loader.multiprocessing_context or multiprocessing).get_start_method()


def _begin(own: _InitFunction | None, trainer: int, is_child: bool, worker: int) -> None:
    """In a worker of the process `trainer`, before its first batch."""
    parent = os.getppid()
    # PyTorch's own look at the parent takes for the parent whoever is it by now.
    if signal.SIGTERM in signal.sigpending() or (is_child and parent != trainer):
        os._exit(0)  # the signal may be the trainer's, which is lost among those of others
    threading.Thread(target=_end_with, args=(trainer, parent), name="parent", daemon=True).start()
    if own is not None:
        own(worker)


def _end_with(trainer: int, parent: int) -> None:
    """Leave once the process that trains has sent SIGTERM, or the parent is no more."""
    while os.getppid() == parent:
        received = signal.sigtimedwait({signal.SIGTERM}, _LOOK_EVERY)
        if received is not None and received.si_pid == trainer:
            break
    os._exit(0)
