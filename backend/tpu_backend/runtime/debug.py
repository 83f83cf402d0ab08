"""What debug mode does after each op: wait for it, and look for values that are not finite."""

from __future__ import annotations

import os
import traceback
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from tpu_backend.runtime.segment import Signature, TensorArg, signature

_PACKAGE = str(Path(__file__).resolve().parent.parent)
_check_nans = os.environ.get("TPU_DEBUG_NANS", "0") == "1"


def set_nan_check(enabled: bool) -> None:
    """Whether debug mode raises at the first op whose output holds a NaN.  Default: ``TPU_DEBUG_NANS=1``."""
    global _check_nans
    _check_nans = enabled


def _user_line() -> str:
    """The innermost Python line that is neither ours nor PyTorch's."""
    import torch

    torch_folder = str(Path(torch.__file__).parent)
    for frame in reversed(traceback.extract_stack()):
        if not frame.filename.startswith((_PACKAGE, torch_folder, "<")):
            return f"{frame.filename}:{frame.lineno}: {frame.line}"
    return "unknown line (autograd's thread; use torch.autograd.set_detect_anomaly for the forward line)"


def _shapes(entry: Signature) -> str:
    shown = [
        f"{argument.name}={list(argument.value.sizes)}"
        for argument in entry.arguments
        if isinstance(argument.value, TensorArg)
    ]
    return ", ".join(shown)


def after_debug_op(number: int, arrays: list[jax.Array]) -> None:
    """Wait for an op's outputs.  Raises RuntimeError that names the op, its shapes and the Python line."""
    entry = signature(number)
    try:
        jax.block_until_ready(arrays)
    except Exception as error:
        raise RuntimeError(f"{entry.overload}({_shapes(entry)}) failed at {_user_line()}: {error}") from error
    if not _check_nans:
        return
    for array in arrays:
        if jnp.issubdtype(array.dtype, jnp.inexact) and bool(np.isnan(np.asarray(array)).any()):
            raise RuntimeError(f"{entry.overload}({_shapes(entry)}) made a NaN at {_user_line()}")
