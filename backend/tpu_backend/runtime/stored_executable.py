"""A loaded executable as bytes, and back: XLA's own serialisation, and what the stream must know beside it.

The one place that makes an executable by other means than `jax.jit`, and so knows how JAX makes arrays of
what a device returns.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax._src.interpreters.pxla import global_aval_to_result_handler
from jax.experimental.compilation_cache.compilation_cache import reset_cache
from jaxlib import xla_client
from jaxlib.cpu import _lapack

from tpu_backend.lowering.bounds import BoundsCheck
from tpu_backend.runtime.target import Target

_ERRORS = {
    error.__name__: error
    for error in (IndexError, RuntimeError, ValueError, torch.linalg.LinAlgError)  # type: ignore[attr-defined]
}


def are_storable(bounds_checks: Sequence[BoundsCheck]) -> bool:
    """Whether each raises an error that has a name here."""
    return all(
        _ERRORS.get(bounds_check.error.__name__) is bounds_check.error for bounds_check in bounds_checks
    )


def header_of(
    outputs: Sequence[jax.ShapeDtypeStruct], bounds_checks: Sequence[BoundsCheck], temporary_bytes: int
) -> dict[str, Any]:
    """What must be known of a program beside XLA's bytes, as JSON holds it.

    Its outputs in order (dtype, shape, whether JAX's promotion takes it for a mere number), its bounds checks
    (error, text, entry, node) and the bytes of memory that it needs while it runs.
    """
    return {
        "outputs": [
            [jnp.dtype(output.dtype).name, list(output.shape), bool(output.weak_type)] for output in outputs
        ],
        "bounds_checks": [
            [bounds_check.error.__name__, bounds_check.text, bounds_check.entry, bounds_check.node]
            for bounds_check in bounds_checks
        ],
        "temporary_bytes": temporary_bytes,
    }


def bounds_checks_of(header: dict[str, Any]) -> tuple[BoundsCheck, ...]:
    return tuple(BoundsCheck(_ERRORS[error], *rest) for error, *rest in header["bounds_checks"])


@contextmanager
def compiled_by_xla() -> Iterator[None]:
    """In here JAX compiles, and takes nothing from a cache of its own: what was loaded from there would
    serialise, but without its functions.
    """
    if not jax.config.jax_compilation_cache_dir:  # type: ignore[attr-defined]
        yield
        return
    with _jax_cache.lock:
        _jax_cache.num_compiling += 1
        if _jax_cache.num_compiling == 1:
            _jax_cache.was_on = jax.config.jax_enable_compilation_cache  # type: ignore[attr-defined]
            _jax_cache.turn(False)
    try:
        yield
    finally:
        with _jax_cache.lock:
            _jax_cache.num_compiling -= 1
            if _jax_cache.num_compiling == 0:
                _jax_cache.turn(_jax_cache.was_on)


class _JaxCache:
    """JAX's own compilation cache, a setting of the process: off while any thread compiles for ours."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.num_compiling = 0
        self.was_on = True

    def turn(self, on: bool) -> None:
        if on != jax.config.jax_enable_compilation_cache:  # type: ignore[attr-defined]
            jax.config.update("jax_enable_compilation_cache", on)
            reset_cache()  # JAX asks for the setting once


_jax_cache = _JaxCache()


def serialize(loaded: Any) -> bytes:
    """XLA's bytes of a loaded executable."""
    return loaded.client.serialize_executable(loaded)


def deserialize(header: dict[str, Any], payload: bytes, target: Target) -> tuple[Any, list[Any]]:
    """A loaded executable for a device of this process, and what makes arrays of its outputs."""
    client = target.device.client
    if b"lapack_" in payload:  # JAX looks LAPACK's functions up while it lowers; else calls go to address 0
        _lapack.initialize()
    options = None
    if target.mesh is None:  # of many processes another one has compiled it, for its own device
        options = xla_client.CompileOptions()
        options.num_replicas = options.num_partitions = 1
        options.device_assignment = xla_client.DeviceAssignment.create(np.array([[target.device.id]]))
    loaded = client.deserialize_executable(payload, target.devices, options)
    sharding = target.placement
    handlers = [
        global_aval_to_result_handler(
            jax.core.ShapedArray(tuple(dims), jnp.dtype(dtype), weak_type=is_weak), sharding, committed=True
        )
        for dtype, dims, is_weak in header["outputs"]
    ]
    return loaded, handlers
