"""What debug mode does after each op: wait for it, name it where it failed, and look for NaNs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from tpu_backend import nan_check
from tpu_backend.runtime.signature import signature
from tpu_backend.runtime.user_line import user_line


def after_debug_op(number: int, arrays: list[jax.Array], failure: str | None) -> None:
    """Wait for an op's outputs.  Raises RuntimeError that names the op, its shapes and the Python line.

    ``failure`` is why the op could not be launched at all.
    """
    entry = signature(number)
    try:
        if failure is not None:
            raise RuntimeError(failure)
        jax.block_until_ready(arrays)
    except Exception as error:
        raise RuntimeError(f"{entry.described()} failed at {user_line()}: {error}") from error
    if not nan_check.enabled():
        return
    for array in arrays:
        if jnp.issubdtype(array.dtype, jnp.inexact) and bool(np.isnan(np.asarray(array)).any()):
            raise RuntimeError(f"{entry.described()} made a NaN at {user_line()}")
