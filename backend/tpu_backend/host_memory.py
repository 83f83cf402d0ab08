"""Values that the host of a TPU keeps, and the order in which they come back."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import lax

from tpu_backend.jax_function import jax_op
from tpu_backend.runtime import gathers


def held_by_host(tensor: torch.Tensor) -> torch.Tensor:
    """The same values. On a TPU they are in the host's memory from here on until they are used, as long as
    the device's is needed for something else.
    """
    held: torch.Tensor = _held()(tensor)
    return held


def taken_from_host(tensor: torch.Tensor, *others: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The same values, of a tensor that `held_by_host` has given and of others. Nothing is computed from one
    of them before all are there, and before the scatters so far.

    XLA:TPU removes barriers behind transfers from the host, and puts off products while one goes on.
    """
    found: tuple[torch.Tensor, ...] = _taken()(tensor, *others)
    return found


def kept_after(arrays: tuple[jax.Array, ...], others: tuple[jax.Array, ...] = ()) -> tuple[jax.Array, ...]:
    """The same values, which a compiler cannot compute before it has one number of each array, others too: it
    does not know that none is more than infinity.
    """
    firsts = [each[(0,) * each.ndim].astype(jnp.float32) for each in (*arrays, *others) if each.size]
    if not firsts:
        return arrays
    is_never = (jnp.stack(firsts) > jnp.inf).any()
    return tuple(lax.select_n(is_never, each, jnp.zeros_like(each)) for each in arrays)


@jax.custom_jvp
def _there_and_back(array: jax.Array) -> Any:
    def of_tpu(array: jax.Array) -> Any:
        of_host = jax.device_put(array, jax.memory.Space.Host)
        return jax.device_put(of_host, jax.memory.Space.Device)

    return lax.platform_dependent(array, tpu=of_tpu, default=lambda array: array)


@_there_and_back.defjvp
def _tangent(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[Any, jax.Array]:
    return _there_and_back(*primals), *tangents


@cache
def _held() -> Callable[..., Any]:
    return jax_op(_there_and_back, name="held_by_host")


@cache
def _taken() -> Callable[..., Any]:
    def taken(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        return kept_after(arrays, gathers.scattered())

    return jax_op(taken, name="taken_from_host")
