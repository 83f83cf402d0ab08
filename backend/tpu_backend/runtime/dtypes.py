"""The one table between PyTorch's dtypes, their numbers in C++ and JAX's dtypes."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import torch

# c10::ScalarType (a stable part of PyTorch's serialisation format) -> torch.dtype
TORCH_DTYPES: dict[int, torch.dtype] = {
    0: torch.uint8,
    1: torch.int8,
    2: torch.int16,
    3: torch.int32,
    4: torch.int64,
    5: torch.float16,
    6: torch.float32,
    7: torch.float64,
    8: torch.complex32,
    9: torch.complex64,
    10: torch.complex128,
    11: torch.bool,
    15: torch.bfloat16,
    23: torch.float8_e5m2,
    24: torch.float8_e4m3fn,
    25: torch.float8_e5m2fnuz,
    26: torch.float8_e4m3fnuz,
    27: torch.uint16,
    28: torch.uint32,
    29: torch.uint64,
}

_JAX_DTYPES: dict[torch.dtype, np.dtype] = {
    dtype: np.dtype(getattr(jnp, "bool_" if dtype is torch.bool else str(dtype).removeprefix("torch.")))
    for dtype in TORCH_DTYPES.values()
    if dtype is not torch.complex32
}

# And back.
EQUIVALENTS: dict[np.dtype, torch.dtype] = {equivalent: dtype for dtype, equivalent in _JAX_DTYPES.items()}

# Dtypes that NumPy has no name for cross the border as integers of the same width.
_CARRIERS: dict[torch.dtype, torch.dtype] = {
    torch.bfloat16: torch.int16,
    torch.complex32: torch.int32,
    torch.float8_e5m2: torch.uint8,
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e5m2fnuz: torch.uint8,
    torch.float8_e4m3fnuz: torch.uint8,
}


def jax_dtype(dtype: torch.dtype | int) -> np.dtype:
    """The JAX dtype of a torch dtype, or of its number in C++.  Raises TypeError where JAX has none."""
    torch_dtype = TORCH_DTYPES.get(dtype) if isinstance(dtype, int) else dtype
    found = _JAX_DTYPES.get(torch_dtype) if torch_dtype is not None else None
    if found is None:
        raise TypeError(
            f"JAX has no equivalent of {torch_dtype or f'ScalarType {dtype}'}; convert the tensor first"
        )
    return found


def stored_dtype(dtype: torch.dtype | int) -> np.dtype:
    """The dtype of the array of a buffer: the JAX dtype, but of complex32 its bits."""
    return np.dtype(np.uint32) if dtype in (torch.complex32, 8) else jax_dtype(dtype)


def lowered_dtype(dtype: torch.dtype | int) -> np.dtype:
    """The dtype that lowerings see: the JAX dtype, but complex64 of complex32 (complex_half.py)."""
    return np.dtype(np.complex64) if dtype in (torch.complex32, 8) else jax_dtype(dtype)


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """A CPU tensor's memory as a NumPy array of the dtype that the device stores, without a copy."""
    carrier = _CARRIERS.get(tensor.dtype)
    if carrier is None:
        return tensor.detach().numpy()
    return tensor.detach().view(carrier).numpy().view(stored_dtype(tensor.dtype))


def from_numpy(array: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """A CPU tensor over a NumPy array's memory, without a copy."""
    carrier = _CARRIERS.get(dtype)
    if carrier is None:
        return torch.from_numpy(array)
    return torch.from_numpy(array.view(jax_dtype(carrier))).view(dtype)
