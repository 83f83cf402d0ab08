"""A process that has used the device alone joins other ranks: XLA's runtime begins anew, as one of many, and
tensors move over through the host.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np
from jax.extend.backend import clear_backends

from tpu_backend import _C
from tpu_backend.distributed import ending
from tpu_backend.padded import serving
from tpu_backend.runtime import ahead, platform, target, transfer


def why_not() -> str | None:
    """Why tensors of this process cannot move; None: they can."""
    name = platform.platform().name
    return None if name == "cpu" else f"a {name} device is opened once in a process"


def move_over(connect: Callable[[], None]) -> None:
    """Close XLA's runtime, `connect` to the other ranks, and give each tensor its value in the new runtime,
    one after the other. Programs are loaded or compiled again. Raises what recorded operations raise.
    """
    _C.synchronize(0)
    ahead.forget()
    serving.forget()
    _C.forget_programs(0)
    clear_backends()
    for cached in (platform.platform, target.target_of, transfer.placement, transfer.form_of_numbers):
        cached.cache_clear()
    try:
        connect()
    finally:  # without the others it goes on alone, in a runtime that is new all the same
        _C.move_values(0, _moved)
    ending.install()


def _moved(array: jax.Array) -> jax.Array:
    return transfer.put_array(np.array(array, copy=True), 0)
