"""Values that wait in the host's memory, between two places of one program for a TPU.

`keep_on_host` begins the copy to the host, `from_host` the copy back. What lies between is an ordinary tensor
of the device: where the two are in different programs, and on other platforms, nothing is copied.

XLA may begin both copies when it likes. It puts them side by side, and then nothing is saved. So each is
tied to what is computed there. The copy to the host ends before `following` goes on. The copy back is a slice
whose start depends on a number of `gradient`, so that it cannot begin before.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import lax

_SUBLANES = 16  # rows of a tile of 16-bit numbers


class _Held(threading.local):
    values: dict[int, tuple[jax.Array, jax.Array]] | None = None
    """Of the program that is being traced: by the id of a value, the value and what the host has of it."""


_held = _Held()


@contextmanager
def one_program() -> Iterator[None]:
    """In here one program is traced on this thread."""
    outer, _held.values = _held.values, {}
    try:
        yield
    finally:
        _held.values = outer


def keep_on_host(tensor: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
    """`following` as it is. From where it is computed, a program for a TPU has in the host's memory what
    `from_host` makes of `tensor`.
    """
    found: torch.Tensor = _keep()(tensor, following)
    return found


def from_host(tensor: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """The values of `tensor`, which was given to `keep_on_host`. They come back when `gradient` is there."""
    found: torch.Tensor = _fetch()(tensor, gradient)
    return found


@cache
def _keep() -> Any:
    from tpu_backend.jax_function import jax_op  # which imports what runs programs, and so this

    return jax_op(lambda array, following: following, name="keep_on_host", on={"tpu": _keep_on_tpu})


@cache
def _fetch() -> Any:
    from tpu_backend.jax_function import jax_op

    return jax_op(lambda array, gradient: array, name="from_host", on={"tpu": _fetch_on_tpu})


def _keep_on_tpu(array: jax.Array, following: jax.Array) -> jax.Array:
    if _held.values is None or array.ndim == 0 or not array.size:
        return following
    # Longer than what is fetched, or its start would be known to be 0.
    rows = array.reshape(-1, array.shape[-1])
    there = jax.device_put(jnp.pad(rows, ((0, _SUBLANES), (0, 0))), jax.memory.Space.Host)
    following, there = lax.optimization_barrier((following, there))
    _held.values[id(array)] = array, there
    return following


def _fetch_on_tpu(array: jax.Array, gradient: jax.Array) -> jax.Array:
    if _held.values is None or id(array) not in _held.values or not gradient.size:
        return array
    _, there = _held.values[id(array)]
    # XLA does not know that no number is more than infinity.
    first = gradient[(0,) * gradient.ndim].astype(jnp.float32)
    start = (first > jnp.inf).astype(jnp.int32)
    rows = array.size // array.shape[-1]
    back = lax.dynamic_slice(there, (start, jnp.int32(0)), (rows, array.shape[-1]))
    return jax.device_put(back, jax.memory.Space.Device).reshape(array.shape)
