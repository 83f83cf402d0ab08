"""How a rank ends: with its own exit code, after it told the others why, and without waiting for them."""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import sys
from collections.abc import Callable
from multiprocessing import util
from typing import Any

from jax._src import api

from tpu_backend import _C
from tpu_backend.distributed import peers

_GRACE = 3.0  # seconds in which the rank that failed first may end before this one
_PLACES = "in aten::", "at "  # how lines of the device's errors begin that say where

_ends_device: list[Callable[[], None]] = []  # at exit; it waits for launches


def note_device(end_device: Callable[[], None]) -> None:
    """To be called when the device has started, after `end_device` was registered for the exit: what is
    registered first ends last.
    """
    _ends_device.append(end_device)
    if peers.world is not None:
        install()


def install() -> None:
    """To be called when the device of this rank has started."""
    hook = sys.excepthook

    def on_exception(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        _publish(error)
        hook(kind, error, trace)

    sys.excepthook = on_exception
    if multiprocessing.parent_process() is None:
        atexit.register(_end)
    else:  # its target's error meets no hook, and a forked process runs nothing of atexit's
        util.Finalize(None, _end_child, exitpriority=1000)


def _publish(error: BaseException) -> None:
    if peers.world is not None and isinstance(error, Exception):
        first, *others = str(error).strip().splitlines() or [""]
        places = [line.strip() for line in others if line.lstrip().startswith(_PLACES)]
        peers.world.publish(" ".join([f"{type(error).__name__}: {first}", *places[: len(_PLACES)]]))


def _end_child() -> None:
    """At the end of a process of `multiprocessing`: the error that ended its target is still in flight."""
    error = sys.exc_info()[1]
    if isinstance(error, SystemExit) and error.code:
        error = error.__context__  # what torch.multiprocessing was handling
    if error is not None:
        _publish(error)
    _end()


def _end() -> None:
    """The last calls of this rank are compared, and what was launched is waited for, unless an error has told
    that they will not end. Where a rank has failed nothing is waited for any more.
    """
    world = peers.world
    assert world is not None
    code = 0
    if not world.has_raised and not world.has_failed:
        try:
            world.confirm(world.timeout)
            _C.wait_for_launches(0)
        except Exception as error:
            world.has_raised = True
            code = 1
            print(f"tpu: found at exit: {error}", file=sys.stderr, flush=True)
    is_irregular = world.has_raised or world.has_failed or world.failure() is not None
    if is_irregular:
        world.let_first_end(_GRACE)
    world.say_farewell()
    if is_irregular:
        _leave(code)


def _leave(code: int) -> None:
    """Have this process end with its own exit code, or with `code` where that is 0."""
    if multiprocessing.parent_process() is not None and code and sys.exc_info()[1] is None:
        raise SystemExit(code)
    for end_device in _ends_device:
        atexit.unregister(end_device)
    atexit.unregister(api.clean_up)
    gc.disable()
    _C.leave(code)
