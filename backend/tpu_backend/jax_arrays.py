"""Tensors as JAX arrays and JAX arrays as tensors, without a copy: `tpu_backend.to_jax` and `from_jax`.

A tensor's contents already are a `jax.Array`, and JAX arrays never change: both sides may hold one.  What
protects them is a lease.  An array that was handed out, or came from outside, is never donated to a program;
a step that would overwrite it in place copies it first (csrc/launch/program.cpp, `execute`).

A `jax.Array` speaks DLPack and NumPy, so this is also the way to and from every other library.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import torch

from tpu_backend import _C, views
from tpu_backend.runtime.dtypes import EQUIVALENTS, TORCH_DTYPES, jax_dtype
from tpu_backend.runtime.platform import platform


def to_jax(tensor: torch.Tensor) -> jax.Array:
    """The values of a tpu tensor as a `jax.Array` of the same shape and dtype, on the same device.

    No copy where the tensor is all of its storage in the shape it was made in; a view is read into an array
    of its own.  The array keeps its values whatever is written to the tensor afterwards.  Runs what was
    recorded, without waiting for it.  Gradients do not flow through (`jax_op` makes JAX functions
    differentiable).  64-bit dtypes stay as they are, whether or not JAX's own x64 switch is on.

    Raises TypeError for anything but a tpu tensor.
    """
    if not isinstance(tensor, torch.Tensor) or tensor.device.type != "tpu":
        found = f"a tensor on {tensor.device}" if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise TypeError(f'to_jax: expected a tpu tensor, got {found}; move it first: tensor.to("tpu")')
    tensor = tensor.detach().resolve_conj().resolve_neg()
    array = _C.lease_array(tensor)
    dtype = jax_dtype(tensor.dtype)
    geometry = views.Geometry(tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), dtype)
    with jax.enable_x64(True):
        if array is None:  # made by torch.empty and never written: some value
            return jnp.zeros(geometry.sizes, dtype, device=platform().devices[tensor.device.index])
        if (
            array.shape == geometry.sizes
            and array.dtype == dtype
            and geometry.offset == 0
            and tensor.is_contiguous()
        ):
            return array
        return _read(array, geometry)


@partial(jax.jit, static_argnums=1)
def _read(array: jax.Array, geometry: views.Geometry) -> jax.Array:
    return views.read(array, geometry)


def from_jax(array: jax.Array) -> torch.Tensor:
    """A contiguous tpu tensor with the values, shape and dtype of a `jax.Array`, sharing its memory.

    Writing to the tensor never reaches the array.  The array must lie whole on the device that tpu:0 is.

    Raises TypeError for anything but a concrete array of a dtype that PyTorch has, ValueError for an array
    that lies elsewhere or on several devices, or that was deleted.
    """
    if not isinstance(array, jax.Array) or isinstance(array, jax.core.Tracer):
        raise TypeError(f"from_jax: expected a concrete jax.Array, got {type(array).__name__}")
    if array.is_deleted():
        raise ValueError("from_jax: the array is deleted: it was donated to a JAX function")
    _C.ensure_initialized()
    dtype = EQUIVALENTS.get(array.dtype)
    if dtype is None:
        raise TypeError(f"from_jax: PyTorch has no dtype for {array.dtype}; convert it first: array.astype")
    held_by, device = array.devices(), platform().devices[0]  # a process drives the first one alone
    if held_by != {device}:
        raise ValueError(
            f"from_jax: the array is on {', '.join(sorted(map(str, held_by)))}, tpu:0 is "
            f"{device}; move it first: jax.device_put(array, device)"
        )
    return _C.tensor_over(_row_major(array), array.shape, _NUMBERS[dtype], 0)


_NUMBERS = {dtype: number for number, dtype in TORCH_DTYPES.items()}


def _row_major(array: Any) -> jax.Array:
    """The array itself, or a copy where it was given another memory order (`jax.experimental.layout`)."""
    layout = array.format.layout
    if layout is None or layout.major_to_minor == tuple(range(array.ndim)):
        return array
    with jax.enable_x64(True):
        return jax.jit(jnp.copy)(array)
