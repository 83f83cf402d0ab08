"""Views: a storage's value is one dense N-dimensional array, a tensor over it only a geometry.

`read` turns (base array, geometry) into the tensor's value, `write` puts a value back through the same
geometry.  In-place operations, ``out=`` and aliasing all rest on these two; both are pure and are called
while lowering.

The base keeps its N dimensions: on a TPU flattening is a physical relayout.  A geometry is therefore resolved
against the base's own dims, in this order

1. **box**     one (strided, possibly dynamic) slice of the base, around which there are only reshapes that
               split or join dims where the geometry itself does, a transpose and a broadcast;
2. **window**  for what straddles dims of the base: the flat range that the view spans, then a box of that;
3. **gather**  by flat index (overlapping windows, strides that do not nest).

With a runtime offset path 1 is taken exactly if the recorder has found the view a box (`Geometry.is_box`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tpu_backend.reinterpret import reinterpret, restore


@dataclass(frozen=True)
class Geometry:
    """Where a tensor's elements lie in its storage; sizes, strides and offset count elements of `dtype`.

    Strides are never negative (as in PyTorch).  A dtype other than the base's reinterprets the base's bytes.
    `is_box` decides about a runtime offset: the recorder's answer for the offset that the view was recorded
    with, which is part of the program's key (csrc/record/layout.h).
    """

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: np.dtype
    is_box: bool = False

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    @property
    def extent(self) -> int:
        """Elements from the first to the last one of the view, both included; 0 for an empty view."""
        if self.numel == 0:
            return 0
        return 1 + sum((size - 1) * stride for size, stride in zip(self.sizes, self.strides, strict=True))


def read(base: jax.Array, geometry: Geometry, offset: jax.Array | None = None) -> jax.Array:
    """The value of a view, of shape ``geometry.sizes`` and dtype ``geometry.dtype``.

    `offset`, a traced int64 scalar, replaces ``geometry.offset`` at run time; the result is right for every
    offset that is in bounds and, where ``geometry.is_box`` is set, makes the view a box.
    Raises ValueError where the view reaches past the end of the base.
    """
    if geometry.numel == 0:
        return jnp.zeros(geometry.sizes, geometry.dtype)
    if _is_in_bits(geometry, base):
        return lax.bitcast_convert_type(read(base, _in_bits(geometry), offset), geometry.dtype)
    elements = reinterpret(base, geometry.dtype)
    _check_bounds(elements, geometry)
    at = geometry.offset if offset is None else offset
    if (digits := _box(elements, geometry, offset)) is not None:
        return _read_view(elements, digits, at, geometry)
    if (window := _Window.of(geometry)) is not None:
        return _from_memory_order(_read_box(window.cut(elements, at), window.digits, 0), geometry)
    kept = _kept_dims(geometry)
    gathered = _take(elements.reshape(-1), _flat_positions(elements, geometry, at))
    return lax.broadcast_in_dim(gathered, geometry.sizes, kept)


def write(
    base: jax.Array, geometry: Geometry, value: jax.Array, offset: jax.Array | None = None
) -> jax.Array:
    """`base` after `value`, which has the shape and dtype of the view, was stored through the view.

    Where elements of the view share a place (expanded or overlapping), the last one in row-major order stays.
    `offset` is as in `read`.  A bool base keeps only whether a byte written through another dtype was 0.
    Raises ValueError where the view reaches past the end of the base or `value` does not match it.
    """
    if value.shape != geometry.sizes or value.dtype != geometry.dtype:
        raise ValueError(
            f"write: the value is {value.dtype}{list(value.shape)}, "
            f"the view is {geometry.dtype}{list(geometry.sizes)}; cast and expand the value first"
        )
    if geometry.numel == 0:
        return base
    if geometry.dtype == np.bool_ and base.dtype != np.bool_:
        # As bytes: a detour through bool would turn every other non-zero byte of the base into 1.
        geometry = replace(geometry, dtype=np.dtype(np.uint8))
        value = value.astype(jnp.uint8)
    if _is_in_bits(geometry, base):
        geometry, value = _in_bits(geometry), lax.bitcast_convert_type(value, jnp.uint16)
    elements = reinterpret(base, geometry.dtype)
    _check_bounds(elements, geometry)
    at = geometry.offset if offset is None else offset
    value = _without_repeats(value, geometry)
    if (digits := _box(elements, geometry, offset)) is not None:
        elements = _write_box(elements, digits, at, _to_memory_order(value, geometry))
    elif (window := _Window.of(geometry)) is not None:
        span = _write_box(window.cut(elements, at), window.digits, 0, _to_memory_order(value, geometry))
        elements = window.paste(elements, at, span)
    else:
        elements = _scatter_last(elements, _flat_positions(elements, geometry, at), value)
    return restore(elements, base)


def _is_in_bits(geometry: Geometry, base: jax.Array) -> bool:
    """Whether other numbers' bytes are looked at as 16-bit floats. XLA may compute with these in float32, on
    some versions with subnormals as 0: numbers beside what is written would change.
    """
    dtype = geometry.dtype
    return dtype != base.dtype and dtype.itemsize == 2 and bool(jnp.issubdtype(dtype, jnp.floating))


def _in_bits(geometry: Geometry) -> Geometry:
    return replace(geometry, dtype=np.dtype(np.uint16))


def _check_bounds(elements: jax.Array, geometry: Geometry) -> None:
    if geometry.offset < 0 or geometry.offset + geometry.extent > elements.size:
        raise ValueError(
            f"view with sizes {list(geometry.sizes)}, strides {list(geometry.strides)} and offset "
            f"{geometry.offset} reaches element {geometry.offset + geometry.extent - 1}, its storage holds "
            f"{elements.size} of {geometry.dtype}: was the storage resized under the view?"
        )


# ---- the dims of a view ------------------------------------------------------------------------------------


def _kept_dims(geometry: Geometry) -> list[int]:
    """The dims along which memory advances, in the view's order: neither of size 1 nor expanded."""
    return [
        d for d, (size, stride) in enumerate(zip(geometry.sizes, geometry.strides)) if size > 1 and stride > 0
    ]


def _ordered_dims(geometry: Geometry) -> list[int]:
    """The kept dims in memory order: largest stride first."""
    return sorted(_kept_dims(geometry), key=lambda dim: -geometry.strides[dim])


def _joined_dims(geometry: Geometry) -> list[tuple[int, int]]:
    """(size, stride) of the kept dims in memory order, joined where two advance through memory as one."""
    joined: list[tuple[int, int]] = []
    for dim in _ordered_dims(geometry):
        size, stride = geometry.sizes[dim], geometry.strides[dim]
        if joined and joined[-1][1] == size * stride:
            joined[-1] = (joined[-1][0] * size, stride)
        else:
            joined.append((size, stride))
    return joined


def _from_memory_order(value: jax.Array, geometry: Geometry) -> jax.Array:
    """From the elements in memory order (any shape) to the view: transpose, then size-1 and expanded dims."""
    kept, ordered = _kept_dims(geometry), _ordered_dims(geometry)
    if kept == ordered and geometry.numel == value.size:
        return value.reshape(geometry.sizes)
    value = value.reshape([geometry.sizes[dim] for dim in ordered])
    if kept != ordered:
        value = lax.transpose(value, [ordered.index(dim) for dim in kept])
    return value if value.shape == geometry.sizes else lax.broadcast_in_dim(value, geometry.sizes, kept)


def _without_repeats(value: jax.Array, geometry: Geometry) -> jax.Array:
    """Only the kept dims of a value to be written: of an expanded dim the last element stays."""
    for dim, (size, stride) in enumerate(zip(geometry.sizes, geometry.strides, strict=True)):
        if size > 1 and stride == 0:
            value = lax.slice_in_dim(value, size - 1, size, axis=dim)
    return value.reshape([geometry.sizes[dim] for dim in _kept_dims(geometry)])


def _to_memory_order(value: jax.Array, geometry: Geometry) -> jax.Array:
    kept, ordered = _kept_dims(geometry), _ordered_dims(geometry)
    return value if kept == ordered else lax.transpose(value, [kept.index(dim) for dim in ordered])


# ---- boxes -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Digit:
    """A dim of the base, split or joined as the view needs it: `size` of its `radix` indices, `step` apart.

    One index is worth `stride` elements of the flattened base.
    """

    radix: int
    stride: int
    size: int
    step: int

    @property
    def span(self) -> int:
        return (self.size - 1) * self.step + 1

    def fits(self, offset: int) -> bool:
        return offset // self.stride % self.radix + self.span <= self.radix

    def start(self, offset: int | jax.Array) -> int | jax.Array:
        if self.span == self.radix:
            return 0
        if isinstance(offset, int):
            return offset // self.stride % self.radix
        return lax.rem(lax.div(offset, _like(offset, self.stride)), _like(offset, self.radix))


def _like(offset: jax.Array, value: int) -> jax.Array:
    return jnp.asarray(value, offset.dtype)


def _box(elements: jax.Array, geometry: Geometry, offset: jax.Array | None) -> list[_Digit] | None:
    """The view's digits over `elements`, the base in the view's dtype; None where it is not a box."""
    if offset is None:
        return _digits(elements.shape, _joined_dims(geometry), geometry.offset)
    return _digits(elements.shape, _joined_dims(geometry), None) if geometry.is_box else None


def _digits(base_dims: Sequence[int], dims: list[tuple[int, int]], offset: int | None) -> list[_Digit] | None:
    """The digits described in csrc/record/layout.h, at `is_box`: for one offset that must fit or, if it is
    None, for any that fits.
    """
    base_dims = list(base_dims)
    while True:
        digits, misfit = _match(base_dims, dims, offset)
        if misfit is None:
            return digits
        if misfit < 0:
            return None
        base_dims[misfit : misfit + 2] = [base_dims[misfit] * base_dims[misfit + 1]]


def _match(
    base_dims: list[int], dims: list[tuple[int, int]], offset: int | None
) -> tuple[list[_Digit], int | None]:
    """Match a view's dims to these base dims.

    Returns the digits, and None or the base dim to join with the one behind it (-1 where there is none).
    """
    digits: list[_Digit] = []
    waiting = list(dims)
    base_stride = 1
    for j in reversed(range(len(base_dims))):
        limit = base_stride * base_dims[j]
        taken: list[tuple[int, int]] = []
        while waiting and waiting[-1][1] < limit:
            size, stride = waiting.pop()
            if stride % base_stride:
                return digits, j
            if (size - 1) * stride >= limit:
                count = limit // stride
                if limit % stride or size % count:
                    return digits, j - 1
                waiting.append((size // count, limit))
                size = count
            taken.append((size, stride))
        first, *others = taken or [(1, base_stride)]
        parts = [
            (first[0], base_stride, first[1] // base_stride),
            *((size, stride, 1) for size, stride in others),
        ]
        for (size, stride, step), upper in zip(
            parts, [*(stride for _, stride in others), limit], strict=True
        ):
            digit = _Digit(upper // stride, stride, size, step)
            if upper % stride or digit.span > digit.radix or (offset is not None and not digit.fits(offset)):
                return digits, j - 1
            digits.insert(0, digit)
        base_stride = limit
    return digits, -1 if waiting else None


def _read_box(base: jax.Array, digits: list[_Digit], offset: int | jax.Array) -> jax.Array:
    digits = _without_steps(digits)
    whole = base.reshape([digit.radix for digit in digits])
    starts = [digit.start(offset) for digit in digits]
    return _cut(whole, starts, [digit.span for digit in digits], [digit.step for digit in digits])


def _read_view(
    base: jax.Array, digits: list[_Digit], offset: int | jax.Array, geometry: Geometry
) -> jax.Array:
    """The view whose box this is.

    What is half of the base or more is cut out of the base in the order of the view's dims. So both halves of
    all heads' features are cut from the value that the heads themselves are. Otherwise a TPU lays halves out
    by tokens, and with them the product that they are cut from, and copies all of it to where heads are
    wanted.
    """
    kept, ordered = _kept_dims(geometry), _ordered_dims(geometry)
    is_large = 2 * math.prod(geometry.sizes[dim] for dim in kept) >= base.size
    in_memory = _of_dims(digits, [geometry.sizes[dim] for dim in ordered])
    if kept == ordered or not is_large or in_memory is None:
        return _from_memory_order(_read_box(base, digits, offset), geometry)
    order = [ordered.index(dim) for dim in kept]
    whole = lax.transpose(base.reshape([digit.radix for digit in in_memory]), order)
    of_view = [in_memory[place] for place in order]
    starts = [digit.start(offset) for digit in of_view]
    value = _cut(whole, starts, [digit.span for digit in of_view], [digit.step for digit in of_view])
    return value if value.shape == geometry.sizes else lax.broadcast_in_dim(value, geometry.sizes, kept)


def _of_dims(digits: list[_Digit], sizes: list[int]) -> list[_Digit] | None:
    """A digit for each dim of these sizes, in their order; None where one that is cut has to be divided."""
    found: list[_Digit] = []
    waiting = list(sizes)
    for digit in reversed(digits):
        if digit.span < digit.radix or digit.step > 1:
            if not waiting or waiting.pop() != digit.size:
                return None
            found.append(digit)
            continue
        done = 1
        while done < digit.size:
            if not waiting or digit.size % (done * waiting[-1]):
                return None
            size = waiting.pop()
            found.append(_Digit(size, digit.stride * done, size, 1))
            done *= size
    return None if waiting else found[::-1]


def _write_box(base: jax.Array, digits: list[_Digit], offset: int | jax.Array, value: jax.Array) -> jax.Array:
    digits = _without_steps(digits)
    value = value.reshape([digit.size for digit in digits])
    whole = base.reshape([digit.radix for digit in digits])
    starts = [digit.start(offset) for digit in digits]
    if any(digit.step > 1 for digit in digits):
        # The places between the steps are written back with what they hold: cheaper than a scatter.
        held = _cut(whole, starts, [digit.span for digit in digits], [1] * len(digits))
        gaps = [(0, 0, digit.step - 1) for digit in digits]
        written = lax.pad(jnp.ones(value.shape, jnp.bool_), jnp.zeros((), jnp.bool_), gaps)
        value = lax.select(written, lax.pad(value, jnp.zeros((), value.dtype), gaps), held)
    return _paste(whole, value, starts).reshape(base.shape)


def _without_steps(digits: list[_Digit]) -> list[_Digit]:
    """Every so many places of a dim as one place of an inner dim: `x[:, -1]` of a value that is kept as
    (B * T, V). Not of the last dim, which a TPU would have to lay out anew.
    """
    found = []
    for digit in digits:
        if digit.step > 1 and digit.stride > 1 and digit.radix % digit.step == 0:
            found.append(_Digit(digit.radix // digit.step, digit.stride * digit.step, digit.size, 1))
            found.append(_Digit(digit.step, digit.stride, 1, 1))
        else:
            found.append(digit)
    return found


def _cut(
    array: jax.Array, starts: Sequence[int | jax.Array], spans: Sequence[int], steps: Sequence[int]
) -> jax.Array:
    """``array[start : start + span : step]`` along every dim; no operation where that is all of it."""
    static = [start for start in starts if isinstance(start, int)]
    if len(static) < len(starts):
        array = lax.dynamic_slice(array, _runtime(starts), spans, allow_negative_indices=False)
        static = [0] * len(starts)
    if array.shape == tuple(spans) and max(steps, default=1) == 1:
        return array
    return lax.slice(array, static, [start + span for start, span in zip(static, spans)], steps)


def _paste(array: jax.Array, value: jax.Array, starts: Sequence[int | jax.Array]) -> jax.Array:
    """`array` with `value` at `starts`; `value` itself where that covers it."""
    if array.shape == value.shape:
        return value
    return lax.dynamic_update_slice(array, value, _runtime(starts), allow_negative_indices=False)


def _runtime(starts: Sequence[int | jax.Array]) -> list[jax.Array]:
    """Starts of one integer dtype; a runtime start keeps its int64, a static one always fits."""
    dtype = next((start.dtype for start in starts if not isinstance(start, int)), jnp.int32)
    return [jnp.asarray(start, dtype) for start in starts]


# ---- windows and gathers -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Window:
    """The flat range that a view spans, padded to whole outermost strides, and the view as a box of it."""

    extent: int
    padding: int
    digits: list[_Digit]

    @staticmethod
    def of(geometry: Geometry) -> _Window | None:
        """None where the strides do not nest: the view is not even a box of a range of its own."""
        dims = _joined_dims(geometry)
        length = math.prod(dims[0]) if len(dims) > 1 else geometry.extent
        if length < geometry.extent or (digits := _digits([length], dims, 0)) is None:
            return None
        return _Window(geometry.extent, length - geometry.extent, digits)

    def cut(self, elements: jax.Array, offset: int | jax.Array) -> jax.Array:
        span = _cut(elements.reshape(-1), [offset], [self.extent], [1])
        return lax.pad(span, jnp.zeros((), span.dtype), [(0, self.padding, 0)]) if self.padding else span

    def paste(self, elements: jax.Array, offset: int | jax.Array, span: jax.Array) -> jax.Array:
        span = _cut(span, [0], [self.extent], [1])
        return _paste(elements.reshape(-1), span, [offset]).reshape(elements.shape)


def _flat_positions(elements: jax.Array, geometry: Geometry, offset: int | jax.Array) -> jax.Array:
    """The flat index of every element of the view, of the shape of its kept dims."""
    dtype = jnp.int32 if elements.size <= np.iinfo(np.int32).max else jnp.int64
    kept = _kept_dims(geometry)
    shape = [geometry.sizes[dim] for dim in kept]
    positions = jnp.full(shape, offset, dtype)
    for axis, dim in enumerate(kept):
        positions += lax.broadcasted_iota(dtype, shape, axis) * geometry.strides[dim]
    return positions


def _scatter_last(elements: jax.Array, positions: jax.Array, value: jax.Array) -> jax.Array:
    """Store value[i] at positions[i]; where positions repeat the largest i stays.

    XLA leaves the order of a scatter with repeated indices open, so the writer of each place is found first,
    by a maximum, which has no order.
    """
    ranks = jnp.arange(value.size, dtype=positions.dtype)
    nobody = jnp.full(elements.size, -1, positions.dtype)
    writer = nobody.at[positions.reshape(-1)].max(
        ranks, mode="promise_in_bounds", wrap_negative_indices=False
    )
    stored = _take(value.reshape(-1), jnp.maximum(writer, 0))
    return lax.select(writer >= 0, stored, elements.reshape(-1)).reshape(elements.shape)


def _take(array: jax.Array, positions: jax.Array) -> jax.Array:
    return array.at[positions].get(mode="promise_in_bounds", wrap_negative_indices=False)
