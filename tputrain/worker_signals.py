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
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.util import Finalize
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data._utils import signal_handling
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
        reading, writing = multiprocessing.Pipe(duplex=False)
        with watch.unbroken(), _blocked(loader), writing:
            with _begins_by(loader, partial(_begin, os.getpid(), _are_children(loader), writing)):
                start(iterator, loader)
            _remember(_Start(iterator, reading))

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
def _begins_by(loader: DataLoader, begin: Callable[[_InitFunction | None, int], None]) -> Iterator[None]:
    own = loader.worker_init_fn
    loader.worker_init_fn = partial(begin, own)
    try:
        yield
    finally:
        loader.worker_init_fn = own


class _Start:
    """Workers that were started together, and which of them have not begun.

    A worker that is no fork opens its semaphores by name as it begins, so they are kept until then.
    """

    def __init__(self, iterator: Any, begun: Connection):
        self._iterator, self._begun = weakref.ref(iterator), begun
        self._late = dict(enumerate(iterator._workers))
        self._kept = iterator._index_queues, iterator._worker_result_queue, iterator._workers_done_event

    def has_late(self) -> bool:
        with suppress(EOFError):  # none is left that could send
            while self._begun.poll():
                self._late.pop(int.from_bytes(self._begun.recv_bytes()))
        return any(worker.is_alive() for worker in self._late.values())

    def end_late(self) -> None:
        """One that has begun may hold a lock, and is left alone."""
        iterator = self._iterator()
        if iterator is not None and iterator._worker_pids_set:
            # PyTorch would raise an error for the worker.
            signal_handling._remove_worker_pids(id(iterator))  # type: ignore[attr-defined]
            iterator._worker_pids_set = False
        for worker in self._late.values():
            worker.kill()


_starts: list[_Start] = []  # with workers that may not have begun


def _remember(start: _Start) -> None:
    if not _starts:
        threading._register_atexit(_end_late_workers)  # type: ignore[attr-defined]
    _starts[:] = [*(each for each in _starts if each.has_late()), start]


def _end_late_workers() -> None:
    """At the end of this process, which takes the semaphores along: a worker would say so in a traceback."""
    for start in _starts:
        if start.has_late():
            start.end_late()


def _are_children(loader: DataLoader) -> bool:
    return _start_method(loader) != "forkserver"  # whose children they are


def _start_method(loader: DataLoader) -> str | None:
    return (loader.multiprocessing_context or multiprocessing).get_start_method()


def _begin(trainer: int, is_child: bool, begun: Connection, own: _InitFunction | None, worker: int) -> None:
    """In a worker of the process `trainer`, before its first batch."""
    begun.send_bytes(worker.to_bytes(4))
    begun.close()
    parent = os.getppid()
    # PyTorch's own look at the parent takes for the parent whoever is it by now.
    if signal.SIGTERM in signal.sigpending() or (is_child and parent != trainer):
        os._exit(0)  # the signal may be the trainer's, which is lost among those of others
    threading.Thread(target=_end_with, args=(trainer, parent), name="parent", daemon=True).start()
    Finalize(None, _leave, exitpriority=-100)  # behind multiprocessing's own
    if own is not None:
        own(worker)


def _leave() -> None:
    """As a forked worker leaves: Python's own end of a process ends threads, which may abort it in C++."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _end_with(trainer: int, parent: int) -> None:
    """Leave once the process that trains has sent SIGTERM, or the parent is no more."""
    while os.getppid() == parent:
        received = signal.sigtimedwait({signal.SIGTERM}, _LOOK_EVERY)
        if received is not None and received.si_pid == trainer:
            break
    os._exit(0)
