"""One call of a lowering, as shapes and dtypes: it can be traced, pickled and compiled for any chip."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from tpu_backend.lowering import TABLE, apply

LOWERINGS = frozenset(TABLE)  # before compiled graphs add theirs


@dataclass(frozen=True)
class Call:
    """One call of a lowering: `args` and `kwargs` hold a ``jax.ShapeDtypeStruct`` where an array comes."""

    lowering: str
    dtype: str  # of its first array, or of its result
    args: list[Any]
    kwargs: dict[str, Any]
    out: tuple[jax.ShapeDtypeStruct | None, ...]
    compute_dtype: Any

    def inputs(self) -> list[jax.ShapeDtypeStruct]:
        """Shapes of its arrays, in order; a random lowering's last one is the PRNG key's data."""
        shapes = [leaf for leaf in jax.tree.leaves((self.args, self.kwargs)) if is_shape(leaf)]
        draws = TABLE[self.lowering].draws
        keys = [jax.ShapeDtypeStruct((2,) if draws == 1 else (draws, 2), np.uint32)]
        return [*shapes, *(keys if draws else [])]

    def evaluate(self, arrays: list[jax.Array]) -> tuple[jax.Array | None, ...]:
        """The lowering's results for these arrays; for use inside ``jax.jit``."""
        entry = TABLE[self.lowering]
        values = iter(arrays)
        args, kwargs = jax.tree.map(
            lambda leaf: next(values) if is_shape(leaf) else leaf, (self.args, self.kwargs)
        )
        key = jax.random.wrap_key_data(next(values)) if entry.draws else None
        return apply(entry, args, kwargs, self.out, self.compute_dtype, key)

    def dtypes(self) -> list[Any]:
        """Of its inputs and outputs, as the runtime sees them."""
        return [leaf.dtype for leaf in (*self.inputs(), *self.out) if leaf is not None]

    def is_declined(self) -> bool:
        """Whether the table says that it runs on the CPU of a machine with TPUs."""
        return not TABLE[self.lowering].compiles_on_tpu(self.dtypes())

    def is_empty(self) -> bool:
        """Whether it has an array without elements: XLA removes what would be computed on it."""
        return any(0 in leaf.shape for leaf in self.inputs())

    def described(self) -> str:
        shapes = ", ".join(f"{leaf.dtype}{list(leaf.shape)}" for leaf in self.inputs())
        return f"{self.lowering}({shapes})"


def shape_of(leaf: Any) -> Any:
    """What stands for a leaf of a call's arguments."""
    if isinstance(leaf, jax.Array) and leaf.dtype == np.complex128 and leaf.ndim == 0:
        return complex(leaf)  # a complex Scalar: the runtime has no inputs of that kind, it is a constant
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if isinstance(leaf, jax.Array) else leaf


def is_shape(leaf: Any) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct)
