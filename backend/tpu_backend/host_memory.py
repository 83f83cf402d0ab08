"""Values that the host of a TPU keeps, and the order in which they come back."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import torch
from jax import lax

from tpu_backend.barrier import kept_after
from tpu_backend.jax_function import jax_op
from tpu_backend.runtime import gathers


def held_by_host(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, of a floating or complex dtype; a tensor of another dtype as it is.

    On a TPU the host's memory holds them until their next use in the same program. The compiler fetches them
    earlier where the device has memory for them. At the end of a program they are on the device.
    """
    if not _is_held(tensor):
        return tensor
    held: torch.Tensor = _held()(tensor)
    return held


def taken_from_host(tensor: torch.Tensor, *others: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The same values, of a tensor that `held_by_host` has given and of others. Nothing is computed from one
    of them before all are there, and before the scatters so far.

    XLA:TPU removes barriers behind transfers from the host, and puts off products while one goes on.
    """
    tensors = (tensor, *others)
    found = iter(_taken()(*filter(_is_held, tensors)) if any(map(_is_held, tensors)) else ())
    return tuple(next(found) if _is_held(each) else each for each in tensors)


def _is_held(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


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
        return kept_after(arrays, gathers.awaited())

    return jax_op(taken, name="taken_from_host")
