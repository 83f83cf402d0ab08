"""A thread that waits for the device where the caller must not: a launch's token has no other way to ask."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import cache
from typing import Any

from tpu_backend.untraced import untraced

_AT_ONCE = 0.01  # seconds in which the thread answers if there is nothing to wait for


def begin(act: Callable[[], Any]) -> Future[Any]:
    """Let the thread call `act`, after what it was given before. If that never returns, nothing is called."""
    future: Future[Any] = Future()
    _waiting().put((act, future))
    return future


_asked: dict[Any, Future[Any]] = {}  # by token of a launch that was not done when it was asked for


@untraced
def is_done(token: Any) -> bool:
    """Whether the launch of this token is done, or has failed."""
    future = _asked.get(token)
    if future is None:
        future = _asked[token] = begin(token.block_until_ready)
    if not wait([future], _AT_ONCE).done:
        return False
    _asked.pop(token, None)
    return True


@cache
def _waiting() -> queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]]:
    acts: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()

    def run() -> None:
        while True:
            act, future = acts.get()
            try:
                future.set_result(act())
            except BaseException as error:
                future.set_exception(error)
            del act, future  # they hold arrays

    threading.Thread(target=run, name="tpu_wait", daemon=True).start()
    return acts
