"""Ctrl-C where JAX would lose it: the program would go on without a word."""

from __future__ import annotations

import functools
import gc
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import ParamSpec, TypeVar

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


def keeps_interrupts(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
    """Have what the handler of Ctrl-C raises in this function come out of it.

    JAX has dozens of places that catch everything (``except:``) and go on another way. A KeyboardInterrupt
    that meets one of them ends there.
    """

    @functools.wraps(function)
    def kept(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
        handler = signal.getsignal(signal.SIGINT)
        if not callable(handler) or threading.current_thread() is not threading.main_thread():
            return function(*args, **kwargs)
        raised: BaseException | None = None
        error: BaseException | None = None

        def handle(number: int, frame: FrameType | None) -> None:
            nonlocal raised
            try:
                handler(number, frame)
            except BaseException as interrupt:
                raised = interrupt
                raise

        try:
            signal.signal(signal.SIGINT, handle)
            result = function(*args, **kwargs)
        except BaseException as caught:
            error = caught
        while True:
            try:
                if signal.getsignal(signal.SIGINT) is handle:
                    signal.signal(signal.SIGINT, handler)
                break
            except BaseException as caught:  # another Ctrl-C
                error = error or caught
        try:
            if raised is not None and raised is not error:
                raise raised from error
            if error is not None:
                raise error
            return result
        finally:
            raised = error = None  # their tracebacks hold this frame

    return kept


def keep_from_collector() -> None:
    """Have a Ctrl-C that meets JAX's callback of the garbage collector raised behind it.

    The collector prints what its callbacks raise and drops it.
    """
    from tpu_backend import _C

    for place, callback in enumerate(gc.callbacks):
        if getattr(callback, "__module__", None) == "jax._src.lib":
            gc.callbacks[place] = _C.keeping_interrupts(callback)
