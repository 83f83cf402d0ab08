"""Reading and writing by index: embedding, index, gather, scatter and their relatives, masks.

Out-of-range indices are reported at the next synchronisation (bounds.py); until then a read is clamped to the
last row and a write is dropped, XLA's own semantics. Duplicate targets of a plain write keep an arbitrary one
of the values, as PyTorch documents.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

from tpu_backend.lowering.bounds import require_fits, require_in_range
from tpu_backend.lowering.data_dependent import true_positions
from tpu_backend.lowering.dims import at_least_1d, wrap_dim
from tpu_backend.lowering.registry import NotLoweredError, is_16_bit, lowering, opmath

_IN_BOUNDS = (
    lax.GatherScatterMode.PROMISE_IN_BOUNDS
)  # XLA itself clamps reads and drops writes: no checks are added


def _positions(index: jax.Array, size: int, may_be_negative: bool = True) -> jax.Array:
    """An index as int32 where it fits (int64 is emulated on TPUs), counted from the front."""
    dtype = jnp.int32 if size < 2**31 else jnp.int64
    index = index.astype(dtype)
    return jnp.where(index < 0, index + size, index) if may_be_negative else index


def _require_from_front(index, size, error=IndexError, text="index out of range in self"):
    """BoundsCheck an index that counts from the front only."""
    require_in_range(index, 0, size, error, text)


def _require_either_end(index, axis, size):
    text = f"index {{index}} is out of bounds for dimension {axis} with size {size}"
    require_in_range(index, -size, size, IndexError, text)


def _read(self, index):
    return self.at[index].get(mode=_IN_BOUNDS, wrap_negative_indices=False)


def _write(self, index):
    """``.set``, ``.add`` and so on of JAX's indexed update, with our bounds convention."""
    target = self.at[index]

    def update(method, values, **options):
        return getattr(target, method)(values, mode=_IN_BOUNDS, wrap_negative_indices=False, **options)

    return update


# ---- embedding


@lowering("embedding")
def embedding(weight, indices, padding_idx=-1, scale_grad_by_freq=False, sparse=False):
    _require_from_front(indices, weight.shape[0])
    return _read(weight, _positions(indices, weight.shape[0], may_be_negative=False))


@lowering("embedding_dense_backward")
def embedding_dense_backward(grad_output, indices, num_weights, padding_idx, scale_grad_by_freq):
    dtype, width = grad_output.dtype, grad_output.shape[-1]
    places = _positions(indices, num_weights, may_be_negative=False).reshape(-1)
    rows = grad_output.reshape(-1, width).astype(opmath(dtype))
    if scale_grad_by_freq:
        counts = _write(jnp.zeros(num_weights, rows.dtype), places)("add", 1)
        rows = rows / _read(counts, places)[:, None]
    if padding_idx >= 0:
        rows = jnp.where((places == padding_idx)[:, None], 0, rows)
    if not is_16_bit(dtype) or places.shape[0] >= num_weights:
        return _write(jnp.zeros((num_weights, width), rows.dtype), places)("add", rows)
    places, rows = _summed_by_place(places, rows, num_weights)
    # `add`, not `set`: XLA then adds the rows to what the gradient is added to, and makes no table of zeros.
    return _write(jnp.zeros((num_weights, width), dtype), places)(
        "add", rows.astype(dtype), indices_are_sorted=True, unique_indices=True
    )


def _summed_by_place(places, rows, end):
    """Sort the places and sum the rows of equal ones: float32 sums take a row a token, and not one a weight.

    Slots that are not used, and places out of range, are at `end` and behind it: a write drops them.
    """
    numbers = lax.iota(places.dtype, places.shape[0])
    places = jnp.where((places < 0) | (places >= end), end, places)
    places, order = lax.sort((places, numbers), num_keys=1, is_stable=True)
    is_next = jnp.concatenate([jnp.zeros_like(places[:1]), (places[1:] != places[:-1]).astype(places.dtype)])
    of_place = jnp.cumsum(is_next, dtype=places.dtype)
    sums = _write(jnp.zeros_like(rows), of_place)("add", _read(rows, order), indices_are_sorted=True)
    return _write(end + numbers, of_place)("set", places, indices_are_sorted=True), sums


@lowering("embedding_renorm", promote="opmath")
def embedding_renorm(self, indices, max_norm, norm_type):
    norms = jnp.power(jnp.sum(jnp.power(jnp.abs(self), norm_type), -1, keepdims=True), 1 / norm_type)
    renormed = jnp.where(norms > max_norm, self * (max_norm / (norms + 1e-7)), self)
    _require_from_front(indices, self.shape[0])
    touched = _write(jnp.zeros(self.shape[0], bool), _positions(indices, self.shape[0]))("set", True)
    return jnp.where(touched[:, None], renormed, self)


# ---- index and index_put: NumPy's advanced indexing


def _is_mask(index: jax.Array | None) -> bool:
    return index is not None and index.dtype in (jnp.bool_, jnp.uint8)


def _numpy_index(self, indices, checked):
    if any(_is_mask(index) for index in indices):
        raise NotLoweredError("indexing with a boolean mask: the result's shape depends on the mask's values")
    for axis, index in enumerate(indices):
        if checked and index is not None:
            _require_either_end(index, axis, self.shape[axis])
    return tuple(
        slice(None) if index is None else _positions(index, self.shape[axis])
        for axis, index in enumerate(indices)
    )


@lowering("index.Tensor")
def index(self, indices):
    return _read(self, _numpy_index(self, indices, checked=True))


@lowering("_unsafe_index.Tensor")
def unsafe_index(self, indices):
    return _read(self, _numpy_index(self, indices, checked=False))


@lowering("index_put", "_index_put_impl")
def index_put(self, indices, values, accumulate=False, unsafe=False):
    if any(_is_mask(index) for index in indices):
        return _put_masked(self, indices, values, accumulate)
    if values.dtype != self.dtype and not _may_be_host_number(values, self.dtype):
        raise NotLoweredError("values of another dtype: PyTorch refuses them, in its own words on the CPU")
    places = _numpy_index(self, indices, checked=not unsafe)
    if accumulate:
        return _accumulate(self, places, values)
    return _write(self, places)("set", values.astype(self.dtype))


def _may_be_host_number(values, dtype):
    """A 0-d tensor of this dtype on the CPU arrives as a number of the widest dtype of its kind."""
    kinds = (jnp.bool_, jnp.integer, jnp.inexact)
    is_one_kind = any(jnp.issubdtype(values.dtype, kind) and jnp.issubdtype(dtype, kind) for kind in kinds)
    return values.ndim == 0 and is_one_kind


@lowering("_unsafe_index_put")
def unsafe_index_put(self, indices, values, accumulate=False):
    return index_put(self, indices, values, accumulate, unsafe=True)


def _put_masked(self, indices, values, accumulate):
    """A lone mask is a select, whatever it is given.  Beside other indices a mask becomes positions.

    Nothing here needs the number of Trues on the host: a number of values that is not theirs is reported at
    the next synchronisation (bounds.py).
    """
    given = [place for place, index in enumerate(indices) if index is not None]
    is_fill = values.size == 1 and len(given) == 1 and not accumulate  # which PyTorch casts
    if not _masks_fit(self, indices) or (values.dtype != self.dtype and not is_fill):
        raise NotLoweredError("index_put of what does not fit: PyTorch's kernel says what is wrong")
    if len(given) == 1:
        return _put_where(self, given[0], indices[given[0]] != 0, values.astype(self.dtype), accumulate)
    return _put_at_masks(self, indices, values, accumulate)


def _masks_fit(self, indices):
    dim = 0
    for index in indices:
        if _is_mask(index) and self.shape[dim : dim + index.ndim] != index.shape:
            return False
        dim += index.ndim if _is_mask(index) else 1
    return dim <= self.ndim


def _put_where(self, axis, mask, values, accumulate):
    """``self[:, mask] = values`` with ``axis`` dims before the mask; values: (before, Trues, behind)."""
    before, behind = self.shape[:axis], self.shape[axis + mask.ndim :]
    values = _broadcastable(values, (*before, None, *behind))
    count = values.shape[axis]
    if count != 1:
        _require_as_many(mask, count, values.shape, self.shape)
    if count == 0:
        return self
    if count > 1:
        order = jnp.cumsum(mask.reshape(-1), dtype=jnp.int32) - 1
        values = jnp.take(values, jnp.clip(order, 0, count - 1), axis, mode="clip")
    shape = mask.shape if count > 1 else (1,) * mask.ndim
    values = values.reshape(*values.shape[:axis], *shape, *values.shape[axis + 1 :])
    mask = mask.reshape(*mask.shape, *(1,) * len(behind))
    return jnp.where(mask, self + values if accumulate else values, self)


def _require_as_many(mask, count, given, indexed):
    text = (
        f"shape mismatch: value tensor of shape {list(given)} cannot be broadcast to the {{index}} places "
        f"where the mask is true, in a tensor of shape {list(indexed)}"
    )
    require_in_range(jnp.sum(mask), count, count + 1, RuntimeError, text)


def _broadcastable(values, shape):
    """``values`` with leading dims of one up to the rank of ``shape``, where None stands for any length."""
    if values.ndim <= len(shape):
        values = values.reshape((1,) * (len(shape) - values.ndim) + values.shape)
        if all(want is None or have in (1, want) for have, want in zip(values.shape, shape)):
            return values
    raise NotLoweredError("index_put of values that do not fit: PyTorch's kernel says what is wrong")


def _put_at_masks(self, indices, values, accumulate):
    """Masks beside other indices: the positions of their Trues, then positions out of range."""
    expanded: list[jax.Array | None] = []  # one a dim; a mask stands for several
    for index in indices:
        expanded += [index] * index.ndim if _is_mask(index) else [index]
    given = [dim for dim, index in enumerate(expanded) if index is not None]
    masks = [index for index in indices if _is_mask(index)]
    if any(mask.ndim == 0 for mask in masks):
        raise NotLoweredError("index_put with a 0-d mask beside other indices")
    block = jnp.broadcast_shapes(
        (1,), *(index.shape for index in expanded if index is not None and not _is_mask(index))
    )
    first = (
        given[0] if given == list(range(given[0], given[-1] + 1)) else 0
    )  # where the block stands in the result
    axis = first + len(block) - 1
    others = [length for dim, length in enumerate(self.shape) if dim not in given]
    shape = (*others[:first], *block[:-1], None, *others[first:])
    values = _broadcastable(values, shape)
    # The number of Trues, where the other indices or the values tell; else as many as there may be.
    size = next((n for n in (block[-1], values.shape[axis]) if n != 1), max(mask.size for mask in masks))
    counts = [jnp.sum(mask != 0) for mask in masks]
    count = size if block[-1] != 1 else functools.reduce(lambda a, b: jnp.where(a == 1, b, a), counts)

    positions: list[jax.Array | slice] = []
    for index in indices:
        if index is None:
            positions.append(slice(None))
        elif not _is_mask(index):
            positions.append(_positions(index, self.shape[len(positions)]))
        else:
            flat = true_positions((index != 0).reshape(-1), size)
            flat = jnp.where(jnp.sum(index != 0) == 1, flat[:1], flat)
            valid = jnp.arange(size) < count
            for length, column in zip(index.shape, jnp.unravel_index(flat, index.shape)):
                positions.append(jnp.where(valid, column, length).astype(jnp.int32))
    target = self.at[tuple(positions)]
    if not accumulate:
        return target.set(values.astype(self.dtype), mode="drop", wrap_negative_indices=False)
    dtype = _sum_dtype(self.dtype)
    target = self.astype(dtype).at[tuple(positions)]
    return target.add(values.astype(dtype), mode="drop", wrap_negative_indices=False).astype(self.dtype)


def _accumulate(self, index, values):
    """Scatter-add; 16-bit floats are added up in float32."""
    dtype = _sum_dtype(self.dtype)
    return _write(self.astype(dtype), index)("add", values.astype(dtype)).astype(self.dtype)


def _sum_dtype(dtype):
    """Booleans are counted, so that their sum is a logical or."""
    return jnp.dtype(jnp.int32) if dtype == jnp.bool_ else opmath(dtype)


@lowering("_unsafe_masked_index")
def unsafe_masked_index(self, mask, indices, fill):
    clamped = _clamped_indices(self, indices)
    return jnp.where(mask, _read(self, clamped), jnp.asarray(fill, self.dtype))


@lowering("_unsafe_masked_index_put_accumulate", one_dtype=("self", "values"))
def unsafe_masked_index_put_accumulate(self, mask, indices, values):
    """Added up in the dtype of the tensor, as on the CPU."""
    return _write(self, _clamped_indices(self, indices))("add", jnp.where(mask, values, 0).astype(self.dtype))


def _clamped_indices(self, indices):
    return tuple(
        slice(None) if index is None else jnp.clip(index, 0, self.shape[axis] - 1).astype(jnp.int32)
        for axis, index in enumerate(indices)
    )


# ---- one index a dimension


@lowering("index_select")
def index_select(self, dim, index):
    if index.dtype not in (jnp.int32, jnp.int64):
        raise NotLoweredError("places that are no integers: PyTorch refuses them, in its own words")
    axis, values = wrap_dim(dim, self.ndim), at_least_1d(self)
    _require_from_front(index, values.shape[axis])
    index = _positions(at_least_1d(index), values.shape[axis], may_be_negative=False)
    result = _read(values, (slice(None),) * axis + (index,))
    return result if self.ndim else result.reshape(())


def _rows(self, dim, index):
    """The indexed update of ``self`` along dim, which is at least 1-d here."""
    axis = wrap_dim(dim, self.ndim)
    return (slice(None),) * axis + (_positions(at_least_1d(index), self.shape[axis]),)


def _expect_rows_of(self, dim, source):
    axis = wrap_dim(dim, self.ndim)
    rows = {each.shape[:axis] + each.shape[axis + 1 :] for each in (self, source)}
    if len(rows) > 1 or self.ndim != source.ndim:
        raise NotLoweredError("rows of another size: PyTorch refuses them, in its own words on the CPU")


@lowering("index_add", one_dtype=("self", "source"), fits={"alpha": "result"})
def index_add(self, dim, index, source, *, alpha=1):
    _expect_rows_of(self, dim, source)
    dtype = _sum_dtype(self.dtype)
    source = at_least_1d(source).astype(dtype)
    if self.dtype == jnp.bool_:
        source = source * (jnp.asarray(alpha) != 0).astype(dtype)
    elif not (isinstance(alpha, (int, float)) and alpha == 1):
        source = source * jnp.asarray(alpha, dtype)
    base, axis = at_least_1d(self), wrap_dim(dim, self.ndim)
    if self.ndim > 1:
        _require_row(index, axis, base.shape[axis])
    else:
        _require_from_front(index, base.shape[axis])
    return _accumulate(base, _rows(base, dim, index), source).reshape(self.shape)


@lowering("index_copy", one_dtype=("self", "source"))
def index_copy(self, dim, index, source):
    base, axis = at_least_1d(self), wrap_dim(dim, self.ndim)
    text = (
        f"index_copy_(): index {{index}} is out of bounds for dimension {axis} with size {base.shape[axis]}"
    )
    _require_from_front(index, base.shape[axis], text=text)
    return _write(base, _rows(base, dim, index))("set", at_least_1d(source)).reshape(self.shape)


@lowering("index_fill.int_Tensor", fits={"value": "result"})
def index_fill_of_tensor(self, dim, index, value):
    if jnp.iscomplexobj(value) and not jnp.iscomplexobj(self):
        raise NotLoweredError(
            "a complex number into real ones: PyTorch refuses it, in its own words on the CPU"
        )
    require_fits(value, self.dtype)
    return index_fill(self, dim, index, value)


@lowering("index_fill.int_Scalar", fits={"value": "result"})
def index_fill(self, dim, index, value):
    base, axis = at_least_1d(self), wrap_dim(dim, self.ndim)
    _require_either_end(index, axis, base.shape[axis])
    value = jnp.asarray(value).astype(self.dtype)
    return _write(base, _rows(base, dim, index))("set", value).reshape(self.shape)


@lowering("index_reduce", one_dtype=("self", "source"))
def index_reduce(self, dim, index, source, reduce, *, include_self=True):
    if index.ndim > 1:
        raise NotLoweredError("indices that are no vector: PyTorch refuses them, in its own words on the CPU")
    _expect_rows_of(self, dim, source)
    base, source = at_least_1d(self), at_least_1d(source)
    _require_from_front(index, base.shape[wrap_dim(dim, self.ndim)])
    # In 16 bit PyTorch's CPU works in the dtype of the tensor, where scatter_reduce is in float32.
    result = _reduce_into(base, _rows(base, dim, index), source, reduce, include_self, base.dtype)
    return result.reshape(self.shape)


def _require_place(index, size):
    text = f"out of range: tried to access index {{index}} on a tensor of {size} elements."
    require_in_range(index, -size, size, IndexError, text)


@lowering("take")
def take(self, index):
    _require_place(index, self.size)
    return _read(self.reshape(-1), _positions(index, self.size))


@lowering("put", one_dtype=("self", "source"))
def put(self, index, source, accumulate=False):
    _require_place(index, self.size)
    flat, index = self.reshape(-1), _positions(index, self.size)
    source = source.reshape(index.shape)
    result = _accumulate(flat, index, source) if accumulate else _write(flat, index)("set", source)
    return result.reshape(self.shape)


# ---- gather and scatter: an index of the tensor's own rank


def _require_row(index, axis, size):
    text = f"index {{index}} is out of bounds for dimension {axis} with size {size}"
    _require_from_front(index, size, RuntimeError, text)


def _grid(shape, dim, index):
    """Index arrays that address each element's own place, with ``dim`` replaced by ``index``."""
    axis = wrap_dim(dim, index.ndim)
    return tuple(
        _positions(index, shape[axis])
        if position == axis
        else lax.broadcasted_iota(jnp.int32, index.shape, position)
        for position in range(index.ndim)
    )


@lowering("gather")
def gather(self, dim, index, *, sparse_grad=False):
    base, positions, axis = at_least_1d(self), at_least_1d(index), wrap_dim(dim, self.ndim)
    if positions.size == 0:
        return jnp.zeros(index.shape, self.dtype)
    _require_row(positions, axis, base.shape[axis])
    cut = tuple(slice(None) if axis == i else slice(n) for i, n in enumerate(positions.shape))
    positions = _positions(positions, base.shape[axis], may_be_negative=False).astype(
        jnp.uint32
    )  # unsigned: no wrap
    return jnp.take_along_axis(base[cut], positions, axis, mode=_IN_BOUNDS).reshape(index.shape)


def _scatter_operands(self, dim, index, src):
    base, index = at_least_1d(self), at_least_1d(index)
    axis = wrap_dim(dim, self.ndim)
    _require_row(index, axis, base.shape[axis])
    src = at_least_1d(src)[tuple(slice(n) for n in index.shape)]
    return base, _grid(base.shape, dim, index), src


@lowering("scatter.src")
def scatter(self, dim, index, src):
    if index.size == 0:
        return self
    base, grid, src = _scatter_operands(self, dim, index, src)
    return _write(base, grid)("set", src).reshape(self.shape)


@lowering("scatter.value", fits={"value": "written"})
def scatter_value(self, dim, index, value):
    return scatter(self, dim, index, _filled(index, value, self.dtype))


def _filled(index, value, dtype):
    return jnp.broadcast_to(jnp.asarray(value).astype(dtype), index.shape)


@lowering("scatter_add")
def scatter_add(self, dim, index, src):
    if index.size == 0:
        return self
    base, grid, src = _scatter_operands(self, dim, index, src)
    return _accumulate(base, grid, src).reshape(self.shape)


@lowering("scatter.reduce", "scatter_reduce.two")
def scatter_reduce(self, dim, index, src, reduce, *, include_self=True):
    if self.dtype == jnp.bool_ and reduce == "mean":
        raise NotLoweredError("a mean of bool: PyTorch refuses it, in its own words on the CPU")
    if index.size == 0:
        return self
    if jnp.iscomplexobj(self) and reduce in ("amax", "amin"):
        raise NotLoweredError(
            "complex numbers have no order: PyTorch refuses them, in its own words on the CPU"
        )
    base, grid, src = _scatter_operands(self, dim, index, src)
    return _reduce_into(base, grid, src, reduce, include_self).reshape(self.shape)


@lowering("scatter.value_reduce", fits={"value": "written"})
def scatter_value_reduce(self, dim, index, value, *, reduce):
    return scatter_reduce(self, dim, index, _filled(index, value, self.dtype), reduce)


_REDUCERS = {  # name: (method of JAX's indexed update, neutral element)
    "add": ("add", lambda dtype: 0),
    "sum": ("add", lambda dtype: 0),
    "mean": ("add", lambda dtype: 0),
    "multiply": ("multiply", lambda dtype: 1),
    "prod": ("multiply", lambda dtype: 1),
    "amax": ("max", lambda dtype: -math.inf if jnp.issubdtype(dtype, jnp.floating) else _limits(dtype)[0]),
    "amin": ("min", lambda dtype: math.inf if jnp.issubdtype(dtype, jnp.floating) else _limits(dtype)[1]),
}


def _limits(dtype):
    return jnp.iinfo(dtype).min, jnp.iinfo(dtype).max


def _reduce_into(self, index, src, reduce, include_self, dtype=None):
    """``dtype`` is the one to work in."""
    method, neutral = _REDUCERS[reduce]
    dtype = _sum_dtype(self.dtype) if dtype is None else dtype
    base = self.astype(dtype)
    if not include_self:
        base = _write(base, index)("set", jnp.asarray(neutral(dtype), dtype))
    result = _write(base, index)(method, src.astype(dtype))
    if reduce == "mean":
        ones = jnp.ones(self.shape, dtype)
        counts = ones if include_self else _write(ones, index)("set", jnp.zeros((), dtype))
        counts = jnp.maximum(_write(counts, index)("add", jnp.ones((), dtype)), 1)
        result = result / counts if jnp.issubdtype(dtype, jnp.inexact) else jnp.floor_divide(result, counts)
    return result


# ---- masks


@lowering("where.self")
def where(condition, self, other, out=None):
    dtype = out[0].dtype
    return jnp.where(condition.astype(bool), self.astype(dtype), other.astype(dtype))


@lowering("masked_fill.Tensor", fits={"value": "result"})
def masked_fill_of_tensor(self, mask, value):
    require_fits(value, self.dtype)
    return masked_fill(self, mask, value)


@lowering("masked_fill.Scalar", fits={"value": "result"})
def masked_fill(self, mask, value):
    return jnp.where(mask, jnp.asarray(value).astype(self.dtype), self)


@lowering("masked_scatter")
def masked_scatter(self, mask, source):
    if mask.dtype != bool:
        raise NotLoweredError("a mask of numbers: PyTorch refuses it, in its own words on the CPU")
    self, mask = jnp.broadcast_arrays(self, mask)
    text = f"Number of elements of source, {source.size}, < number of ones in mask, {{index}}"
    require_in_range(jnp.sum(mask), 0, source.size + 1, RuntimeError, text)
    if source.size == 0:
        return self
    order = jnp.cumsum(mask.reshape(-1), dtype=jnp.int32) - 1
    taken = _read(source.reshape(-1), jnp.maximum(order, 0)).reshape(self.shape)
    return jnp.where(mask, taken, self)


@lowering("masked_scatter_backward")
def masked_scatter_backward(grad_output, mask, sizes):
    count = math.prod(sizes)
    mask = jnp.broadcast_to(mask, grad_output.shape).reshape(-1)
    order = jnp.where(
        mask, jnp.cumsum(mask, dtype=jnp.int32) - 1, count
    )  # not selected: dropped past the end
    packed = jnp.zeros(count, grad_output.dtype).at[order].set(grad_output.reshape(-1), mode="drop")
    return packed.reshape(sizes)


@lowering("_masked_scale", "native_dropout_backward", promote="result")
def masked_scale(self, mask, scale):
    return self * mask * scale
