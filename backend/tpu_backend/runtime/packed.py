"""A flat buffer that is not flattened: FSDP2 packs the tensors of a layer into one, for one collective.

On a TPU to flatten a tensor is a relayout. So in the replay of a segment a value may be `Packed`: its parts
keep their dims. A copy packs, a collective maps over the parts, a view takes one out. Whatever else looks at
it gets the whole.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tpu_backend import _C, views
from tpu_backend.lowering import registry
from tpu_backend.lowering.platforms import lowered_for
from tpu_backend.runtime import gathers
from tpu_backend.runtime.dtypes import TORCH_DTYPES, lowered_dtype
from tpu_backend.runtime.signature import Signature


@dataclass(frozen=True)
class Packed:
    """An array of shape `dims`. In memory order it has `rows` rows of equal length; in each row the parts
    follow each other, and each part has an equal share of its elements in each row.
    """

    parts: tuple[jax.Array, ...]
    dims: tuple[int, ...]
    rows: int = 1

    def __post_init__(self) -> None:
        assert sum(part.size for part in self.parts) == math.prod(self.dims)
        assert all(part.size % self.rows == 0 for part in self.parts)

    @property
    def dtype(self) -> Any:
        return self.parts[0].dtype

    def is_of(self, dtype: int) -> bool:
        """Whether its elements are a tensor's of this dtype, as they are."""
        return self.dtype == lowered_dtype(TORCH_DTYPES[dtype])

    def whole(self) -> jax.Array:
        if len(self.parts) == 1:
            return self.parts[0].reshape(self.dims)
        columns = [part.reshape(self.rows, part.size // self.rows) for part in self.parts]
        return jnp.concatenate(columns, axis=1).reshape(self.dims)

    def map(self, function: Callable[[jax.Array], jax.Array]) -> Packed:
        """The same packing of other parts of the same sizes."""
        return replace(self, parts=tuple(function(part) for part in self.parts))

    def view(self, geometry: views.Geometry) -> Packed | None:
        """What a view with a constant offset shows; None where it cuts parts."""
        if geometry.dtype != self.dtype or geometry.numel == 0:
            return None
        row = math.prod(self.dims) // self.rows
        if _is_contiguous(geometry):
            if geometry.numel == math.prod(self.dims):
                return replace(self, dims=geometry.sizes)
            if self.rows == 1 or len(self.parts) == 1:
                return self._range(geometry)
            return None
        columns = geometry.sizes[-1] if geometry.sizes else 0
        if geometry.sizes != (self.rows, columns) or geometry.strides != (row, 1):
            return None
        return self._columns(geometry.offset, columns, geometry.sizes)

    def _columns(self, start: int, length: int, dims: tuple[int, ...]) -> Packed | None:
        """The parts that fill these columns of each row."""
        ends = list(itertools.accumulate(part.size // self.rows for part in self.parts))
        found = [
            part
            for part, end in zip(self.parts, ends, strict=True)
            if start < end and end - part.size // self.rows < start + length
        ]
        if start not in (0, *ends) or start + length not in ends:
            return None
        return Packed(tuple(found), dims, self.rows)

    def _range(self, geometry: views.Geometry) -> Packed | None:
        """Consecutive elements: whole parts, or whole rows of one part."""
        start, length = geometry.offset, geometry.numel
        if len(self.parts) > 1 and (parts := self._columns(start, length, geometry.sizes)) is not None:
            return parts
        at = 0
        for part in self.parts:
            if at <= start and start + length <= at + part.size:
                stride = part.size // part.shape[0] if part.ndim else 1
                first = start - at
                if part.ndim == 0 or first % stride or length % stride:
                    return None
                rows = part[first // stride : (first + length) // stride]
                return Packed((rows,), geometry.sizes)
            at += part.size
        return None

    def written(self, geometry: views.Geometry, value: Packed) -> Packed | None:
        """This buffer after a write through a view with a constant offset; None where that cuts parts, but
        for those of one dim.
        """
        if self.rows != 1 or value.rows != 1 or not _is_contiguous(geometry) or geometry.dtype != self.dtype:
            return None
        begin, end = geometry.offset, geometry.offset + geometry.numel
        before: list[jax.Array] = []
        behind: list[jax.Array] = []
        at = 0
        for part in self.parts:
            first, last = at, at + part.size
            at = last
            if last <= begin:
                before.append(part)
            elif first >= end:
                behind.append(part)
            else:
                if (first < begin or last > end) and part.ndim != 1:
                    return None
                if first < begin:
                    before.append(part[: begin - first])
                if last > end:
                    behind.append(part[end - first :])
        return replace(self, parts=(*before, *value.parts, *behind))


Value = jax.Array | Packed


def whole(value: Any) -> Any:
    """An array where it is packed; anything else as it is, lists item by item."""
    if isinstance(value, list):
        return [whole(item) for item in value]
    return value.whole() if isinstance(value, Packed) else value


def zeros(dims: Sequence[int], dtype: Any) -> Value:
    """A new buffer; a flat one may be packed into."""
    made = jnp.zeros(dims, dtype)
    return Packed((made,), made.shape) if made.ndim == 1 and made.size else made


def read(base: Value, geometry: views.Geometry | None, offset: jax.Array | None) -> Value:
    """The value of a view, see `views.read`; packed where the base is, or where the view only flattens it."""
    if isinstance(base, Packed) and (parts := gathers.renewed(base.parts)) is not base.parts:
        base = replace(base, parts=parts)
    if geometry is None:
        return base
    if offset is None:
        packed = base
        if not isinstance(packed, Packed) and packed.size == geometry.numel:
            packed = Packed((packed,), packed.shape)
        if isinstance(packed, Packed) and (found := packed.view(geometry)) is not None:
            return found
    return views.read(whole(base), geometry, offset)


def write(base: Value, geometry: views.Geometry, value: Value, offset: jax.Array | None) -> Value:
    """The base after a write, see `views.write`; packed where it was, if that can be."""
    if isinstance(base, Packed) and offset is None:
        given = value if isinstance(value, Packed) else Packed((value,), value.shape)
        if (found := base.written(geometry, given)) is not None:
            return found
    return views.write(whole(base), geometry, whole(value), offset)


class Write(NamedTuple):
    """What is written through a view; `offset`: where it starts, if that is an input."""

    geometry: views.Geometry
    value: Value
    offset: jax.Array | None


def write_all(base: Value, writes: Sequence[Write]) -> Value:
    """The base after these writes, which do not overlap."""
    if len(writes) > 1 and (found := _joined(base, writes)) is not None:
        return found
    for each in writes:
        base = write(base, *each)
    return base


def _joined(base: Value, writes: Sequence[Write]) -> Packed | None:
    """The same of a flat base, put together once: XLA would compile one update after another for long."""
    if isinstance(base, Packed) or base.ndim != 1 or any(each.offset is not None for each in writes):
        return None
    if any(not _is_contiguous(each.geometry) or each.geometry.dtype != base.dtype for each in writes):
        return None
    parts, end = list[jax.Array](), 0
    for geometry, value, _ in sorted(writes, key=lambda each: each.geometry.offset):
        if end < geometry.offset:
            parts.append(base[end : geometry.offset])
        parts.append(whole(value))
        end = geometry.offset + geometry.numel
    if end < base.size:
        parts.append(base[end:])
    return Packed(tuple(parts), base.shape)


def _is_contiguous(geometry: views.Geometry) -> bool:
    expected = 1
    for size, stride in zip(reversed(geometry.sizes), reversed(geometry.strides), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


# ---- the operators that look at parts ----------------------------------------------------------------------


def apply(entry: Signature, args: Sequence[Any], kwargs: dict[str, Any]) -> Packed | None:
    """The result of an entry that works on the parts; None where it does not."""
    rule = RULES.get(entry.name)
    output = entry.outputs[0]
    if rule is None or len(entry.outputs) != 1 or output.skip or output.computed is None:
        return None
    if not jnp.issubdtype(output.computed.dtype, jnp.floating):
        return None
    made = rule(*args, **kwargs)
    if made is None or made.dims != tuple(output.computed.shape) or made.dims != output.sizes:
        return None
    if _C.memory_order(output.sizes, output.strides) != tuple(range(len(output.sizes))):
        return None
    computed, stored = output.computed.dtype, lowered_dtype(output.dtype)
    made = made.map(lambda part: gathers.converted(part, computed, stored))
    return made if output.partial else replace(made, dims=output.layout_dims)


def _copy(source: Any) -> Packed | None:
    return source if isinstance(source, Packed) else None


def _cat(tensors: Any, dim: int = 0) -> Packed | None:
    """Of vectors, or of matrices side by side."""
    if any(not isinstance(each, (Packed, jax.Array)) or each.dtype != tensors[0].dtype for each in tensors):
        return None
    dims = [each.dims if isinstance(each, Packed) else each.shape for each in tensors]
    rows = {(1, 0): 1, (2, 1): dims[0][0], (2, -1): dims[0][0]}.get((len(dims[0]), dim))
    if rows is None or any(len(each) != len(dims[0]) or 0 in each for each in dims):
        return None
    parts: list[jax.Array] = []
    for each in tensors:
        if not isinstance(each, Packed):
            parts.append(each)
        elif each.rows == rows or len(each.parts) == 1:
            parts += each.parts
        else:
            return None
    length = sum(each[-1] for each in dims)
    return Packed(tuple(parts), (length,) if rows == 1 and len(dims[0]) == 1 else (rows, length), rows)


def _all_gather(self: Any, ranks: Sequence[int]) -> Packed | None:
    if not isinstance(self, Packed) or self.rows != 1 or len(self.dims) != 1 or _joins_collectives():
        return None
    return Packed(gathers.gathered(self.parts, ranks), (len(ranks) * self.dims[0],), len(ranks))


def _reduce_scatter(self: Any, reduce: str, ranks: Sequence[int]) -> Packed | None:
    if not isinstance(self, Packed) or len(self.dims) != 1 or _joins_collectives():
        return None
    if self.rows != len(ranks) and len(self.parts) > 1:
        return None
    scatter = registry.TABLE["tpu_collective::reduce_scatter"].function
    parts = tuple(scatter(_divisible(part, len(ranks)), reduce, ranks) for part in self.parts)
    return Packed(gathers.scattered(parts), (self.dims[0] // len(ranks),))


def _all_reduce(self: Any, reduce: str, ranks: Sequence[int]) -> Packed | None:
    """Of FSDP2's replicas, which are one rank where there are none: behind each reduce-scatter."""
    if not isinstance(self, Packed) or (len(ranks) > 1 and _joins_collectives()):
        return None
    function = registry.TABLE["tpu_collective::all_reduce"].function
    return self.map(lambda part: function(part, reduce, ranks))


def _divisible(part: jax.Array, count: int) -> jax.Array:
    """With a first dim that can be divided: as few dims as must be are joined."""
    dims = list(part.shape)
    while dims[0] % count:
        dims[:2] = [dims[0] * dims[1]]
    return part.reshape(dims)


def _joins_collectives() -> bool:
    """The CPU's collectives cost by their number, and a relayout costs nothing there."""
    return lowered_for() == "cpu"


RULES: dict[str, Callable[..., Packed | None]] = {
    "tpu::copy": _copy,
    "cat": _cat,
    "tpu_collective::all_gather": _all_gather,
    "tpu_collective::all_reduce": _all_reduce,
    "tpu_collective::reduce_scatter": _reduce_scatter,
}
