"""Memory across the border: host tensors to device arrays and back."""

from __future__ import annotations

import warnings
from functools import cache, lru_cache
from typing import Any

import jax
import numpy as np
import torch
from jax.sharding import SingleDeviceSharding
from jaxlib import _jax

from tpu_backend.runtime.described import NoArray
from tpu_backend.runtime.dtypes import TORCH_DTYPES, from_numpy, to_numpy
from tpu_backend.runtime.platform import platform

count = 0  # of tensors that were moved, to the device or from it: a step has some at least


def put_array(host: np.ndarray, index: int) -> jax.Array:
    """A device array over a host array that nobody writes any more.

    XLA may keep a CPU array's memory instead of copying it, so the caller gives up `host`.
    """
    sharding, device = placement(index)
    if host.dtype.itemsize < 8:
        return _jax.batched_device_put(_aval(host.shape, host.dtype), sharding, [host], [device], True)
    with jax.enable_x64(True):  # or JAX would narrow 64-bit types
        return _jax.batched_device_put(_aval(host.shape, host.dtype), sharding, [host], [device], True)


@cache
def placement(index: int) -> tuple[SingleDeviceSharding, jax.Device]:
    device = platform().devices[index]
    return SingleDeviceSharding(device), device


@lru_cache(4096)
def _aval(shape: tuple[int, ...], dtype: np.dtype) -> jax.core.ShapedArray:
    with jax.enable_x64(True):
        return jax.core.ShapedArray(shape, dtype)


def put(tensor: torch.Tensor, index: int) -> jax.Array:
    """A contiguous CPU tensor as an array on device `index`.  Copies: the tensor may be written right
    after.
    """
    global count
    count += 1
    return put_array(np.array(to_numpy(tensor), order="C", copy=True), index)


def copy(array: jax.Array | NoArray) -> jax.Array | NoArray:
    """The array once more, in memory of its own on the same device."""
    if isinstance(array, NoArray):
        return array  # nobody writes it
    return jax.device_put(array, array.sharding, may_alias=False)


def put_numbers(numbers: np.ndarray, index: int) -> jax.Array:
    """A segment's packed runtime numbers (1-d, float32, float64 or int64) on device `index`.

    Each step comes here with a cold cache: every call that is saved counts.
    """
    aval, sharding, devices = form_of_numbers(len(numbers), numbers.dtype, index)
    if numbers.dtype.itemsize < 8:
        return _jax.batched_device_put(aval, sharding, [numbers], devices, True)
    with jax.enable_x64(True):
        return _jax.batched_device_put(aval, sharding, [numbers], devices, True)


@lru_cache(4096)
def form_of_numbers(
    count: int, dtype: np.dtype, index: int
) -> tuple[jax.core.ShapedArray, SingleDeviceSharding, list[jax.Device]]:
    sharding, device = placement(index)
    return _aval((count,), dtype), sharding, [device]


def get(array: jax.Array, dtype: int, token: Any) -> torch.Tensor:
    """A device array as a CPU tensor; waits for it, and first for the launch that computes it, where one is
    given: if XLA has no memory for one of a program's results, the others never come.  Read-only where XLA's
    memory is shared (the CPU).
    """
    global count
    count += 1
    if token is not None:
        token.block_until_ready()
    return from_numpy(np.asarray(array), TORCH_DTYPES[dtype])


def wait(tokens: list[Any]) -> None:
    """Return when these launches, each given by its token, are done; raises what one of them raised."""
    for token in tokens:
        token.block_until_ready()


def spend_read_only_warning() -> None:
    """PyTorch warns once a process that a NumPy array is read-only; ours are, and are never written."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        read_only = np.zeros(1, np.float32)
        read_only.flags.writeable = False
        torch.from_numpy(read_only)
