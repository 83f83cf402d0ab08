"""Dynamo stays out of what the device itself runs in Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch._C._dynamo import eval_frame

_Function = TypeVar("_Function", bound=Callable)


def untraced(function: _Function) -> _Function:
    """Have Dynamo skip a Python function that C++ calls, and all that it calls.

    What Dynamo leaves to eager mode (behind a graph break, say) runs with its hook on every Python frame: the
    first call of an operator would have it trace JAX. `torch.compiler.disable` says the same, but imports
    Dynamo, which takes a second.
    """
    skip = eval_frame._FrameAction.SKIP
    strategy = eval_frame._FrameExecStrategy(skip, skip)
    eval_frame.set_code_exec_strategy(function.__code__, strategy)
    return function
