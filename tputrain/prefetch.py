"""An iterator that is gone through by a thread, some items ahead of who uses them."""

import threading
from collections.abc import Iterator
from contextlib import suppress
from queue import Empty, Full, Queue
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Prefetched(Generic[Item]):
    """The items of an iterator, in order, up to `ahead` of them made before they are asked for.

    What the iterator raises is raised where its item would have come. `close` ends the thread after the item
    it is at, and `wait_until_ended` waits for that. The thread is a daemon, so that a read that never returns
    does not keep the process alive.
    """

    _END = object()

    def __init__(self, items: Iterator[Item], ahead: int):
        self._queue: Queue[tuple[object, BaseException | None]] = Queue(maxsize=ahead)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(items,), name="data-prefetch", daemon=True)
        self._thread.start()

    def __iter__(self) -> "Prefetched[Item]":
        return self

    def __next__(self) -> Item:
        if self._closed.is_set():
            raise StopIteration
        item, error = self._queue.get()
        if item is not self._END:
            return item  # type: ignore[return-value]
        self._closed.set()
        raise StopIteration if error is None else error

    def close(self) -> None:
        """Forget what was made ahead, and make no more."""
        self._closed.set()
        with suppress(Empty):
            while True:
                self._queue.get_nowait()

    def wait_until_ended(self) -> None:
        """Close, and return once the thread touches the iterator no more."""
        self.close()
        self._thread.join()

    def _run(self, items: Iterator[Item]) -> None:
        try:
            for item in items:
                if not self._put(item, None):
                    return
        except BaseException as error:  # whatever it is, it is for who waits for the item
            self._put(self._END, error)
        else:
            self._put(self._END, None)

    def _put(self, item: object, error: BaseException | None) -> bool:
        """Whether the item was taken into the queue, and not closed instead."""
        while not self._closed.is_set():
            with suppress(Full):
                # Not for ever: nobody wakes a thread that waits for room in what was closed.
                self._queue.put((item, error), timeout=0.2)
                return True
        return False
