"""Operators whose output shapes depend on data: nonzero, masks, unique, bincount, repeat_interleave.

Each is a kernel of three steps: a program that counts, one read of that count by the host, and a program
that computes the result padded to a *bucket*, the next power of two. So the number of programs grows with
the logarithm of the count. The result is the head of the padded buffer: its sizes and strides are exact, its
storage may be up to twice as large.

Where a result is wanted in a memory layout in which it is no head of a padded one, the program takes the
count as an input and computes every element's place.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

from tpu_backend import _C
from tpu_backend.composite import outputs
from tpu_backend.on_cpu import is_on_device, on_cpu
from tpu_backend.runtime.shapes import lstsq_results
from tpu_backend.untraced import untraced

_aten, _tpu = torch.ops.aten, torch.ops.tpu


@cache
def register() -> tuple[Library, ...]:
    """Give the device these kernels, for the life of the process.  Idempotent."""
    own = Library("tpu", "FRAGMENT")
    for schema, infer in _PROGRAMS.items():
        own.define(schema)
        own.impl(schema.partition("(")[0], untraced(infer), "Meta")
    # What the recorder calls where an overload with a lowering is met in a form that depends on data.
    for schema, kernel in _DYNAMIC_FORMS.items():
        own.define(schema)
        own.impl(schema.partition("(")[0], untraced(kernel), "PrivateUse1")
    aten = Library("aten", "IMPL")
    for overload, kernel in _KERNELS.items():
        aten.impl(overload, untraced(kernel), "PrivateUse1")
    return own, aten


# ---- buckets -----------------------------------------------------------------------------------------------

_SMALLEST_BUCKET = 8


def bucket(count: int, limit: int | None = None) -> int:
    """The padded length of `count` elements: a power of two, at least 8, at most `limit`."""
    size = max(_SMALLEST_BUCKET, 1 << (count - 1).bit_length())
    return size if limit is None else min(size, limit)


def _read(*counts: Tensor) -> list[int]:
    """Numbers of the device (integer tensors of one element), in one read."""
    return (torch.stack(counts) if len(counts) > 1 else counts[0].reshape(1)).tolist()


def _head(padded: Tensor, size: Sequence[int], stride: Sequence[int] | None = None) -> Tensor:
    """The padded result as a tensor of its true size (contiguous without `stride`), its program dispatched.

    What follows is compiled for each count anyway; kept apart from it, this program is not.
    """
    _C.flush(padded.device.index)
    return padded.as_strided_(size, _contiguous(size) if stride is None else stride)


def _contiguous(size: Sequence[int]) -> list[int]:
    strides = [1] * len(size)
    for dim in range(len(size) - 1, 0, -1):
        strides[dim - 1] = strides[dim] * max(size[dim], 1)
    return strides


def _write_out(op: Any, result: Tensor, *args: Any, out: Tensor, **kwargs: Any) -> Tensor:
    """The ``out=`` form of an operator: `result` in `out`, which takes its size."""
    if out.dtype != result.dtype or out.device != result.device:
        result = on_cpu(op, *args, **kwargs, out=torch.empty(0, dtype=out.dtype, device=result.device))
    if out.shape != result.shape:
        outputs.resize(out, result.shape).as_strided_(result.shape, result.stride())
    return out.copy_(result)


# ---- masks -------------------------------------------------------------------------------------------------


def nonzero(self: Tensor) -> Tensor:
    """int64 (count, ndim), column by column in memory, as on the CPU."""
    [count] = _read(self.count_nonzero()) if self.numel() else [0]
    return _indices(self, count)


def _indices(mask: Tensor, count: int) -> Tensor:
    """nonzero() of a mask with `count` Trues."""
    size, stride = (count, mask.dim()), (1, count)
    if count == 0 or mask.dim() == 0:
        return torch.empty_strided(size, stride, dtype=torch.int64, device=mask.device)
    elements = bucket(count * mask.dim(), mask.numel() * mask.dim())
    return _head(_tpu.true_indices(mask, count, size=elements), size, stride)


def nonzero_out(self: Tensor, *, out: Tensor) -> Tensor:
    return _write_out(_aten.nonzero.out, nonzero(self), self, out=out)


def nonzero_static(self: Tensor, *, size: int, fill_value: int = -1) -> Tensor:
    """int64 (size, ndim), without a read. Contiguous as on the CPU; PyTorch's meta kernel is not."""
    if size < 0:
        return on_cpu(_aten.nonzero_static.default, self, size=size, fill_value=fill_value)
    return _tpu.nonzero_static(self, size=size, fill_value=fill_value)


def nonzero_static_out(self: Tensor, *, size: int, fill_value: int = -1, out: Tensor) -> Tensor:
    result = nonzero_static(self, size=size, fill_value=fill_value)
    return _write_out(_aten.nonzero_static.out, result, self, size=size, fill_value=fill_value, out=out)


def masked_select(self: Tensor, mask: Tensor) -> Tensor:
    """The elements of `self` where the mask is True, both broadcast: 1-d."""
    try:
        self, mask = torch.broadcast_tensors(self, mask)
    except RuntimeError:
        return on_cpu(_aten.masked_select.default, self, mask)
    if mask.dtype != torch.bool:
        return on_cpu(_aten.masked_select.default, self, mask)
    [count] = _read(mask.count_nonzero()) if mask.numel() else [0]
    return _select(
        self.reshape(1) if self.dim() == 0 else self, mask.reshape(1) if mask.dim() == 0 else mask, 0, count
    )


def masked_select_out(self: Tensor, mask: Tensor, *, out: Tensor) -> Tensor:
    return _write_out(_aten.masked_select.out, masked_select(self, mask), self, mask, out=out)


def _select(self: Tensor, mask: Tensor, axis: int, count: int) -> Tensor:
    """`self[:, mask]`, with `axis` dims before a mask of `count` Trues (at least 1-d)."""
    size = [*self.shape[:axis], count, *self.shape[axis + mask.dim() :]]
    stride = _contiguous(size) if self.is_contiguous() else _indexed_strides(self, mask, axis, count)
    if 0 in size:
        return torch.empty_strided(size, stride, dtype=self.dtype, device=self.device)
    order = sorted(range(len(size)), key=lambda dim: -stride[dim])
    if order[0] == axis:
        slices = bucket(count, mask.numel())
        padded = _tpu.masked_slices(self, mask, axis=axis, order=order, size=slices)
    else:
        rest = self.numel() // mask.numel()
        elements = bucket(count * rest, self.numel())
        padded = _tpu.masked_elements(self, mask, count, axis=axis, order=order, size=elements)
    return _head(padded, size, stride)


def _indexed_strides(self: Tensor, mask: Tensor, axis: int, count: int) -> Sequence[int]:
    """PyTorch's own inference for an index of positions."""
    meta = torch.empty_strided(self.shape, self.stride(), dtype=self.dtype, device="meta")
    positions = torch.empty(count, dtype=torch.int64, device="meta")
    return _aten.index.Tensor(meta, [None] * axis + [positions] * mask.dim()).stride()


def index(self: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
    """Indexing with masks. A lone mask selects; beside other indices masks become positions."""
    given = [(place, item) for place, item in enumerate(indices) if item is not None]
    masks = [item for _, item in given if _is_mask(item)]
    if not masks or not _fits(self, indices):
        return on_cpu(_aten.index.Tensor, self, indices)
    if any(mask.dtype == torch.uint8 for mask in masks):
        warnings.warn(
            "indexing with dtype torch.uint8 is now deprecated, please use a dtype torch.bool instead.",
            stacklevel=2,
        )
    counts = _count(masks)
    masks = [mask.to(self.device) for mask in masks]
    if len(given) == 1 and masks[0].dim():
        return _select(self, masks[0], given[0][0], counts[0])
    pairs = iter(zip(masks, counts, strict=True))
    positions: list[Tensor | None] = []
    for item in indices:
        if item is None or not _is_mask(item):
            positions.append(item)
            continue
        mask, count = next(pairs)
        if mask.dim() == 0:  # a dim of its own
            self, mask = self.unsqueeze(len(positions)), mask.reshape(1)
        positions.extend(_indices(mask, count).unbind(1))
    return _aten.index.Tensor(self, positions)


def index_out(self: Tensor, indices: Sequence[Tensor | None], *, out: Tensor) -> Tensor:
    return _write_out(_aten.index.Tensor_out, index(self, indices), self, indices, out=out)


def _is_mask(item: Tensor) -> bool:
    return item.dtype in (torch.bool, torch.uint8)


def _fits(self: Tensor, indices: Sequence[Tensor | None]) -> bool:
    """Whether each mask has the sizes of the dims that it stands for."""
    dim = 0
    for item in indices:
        if item is not None and _is_mask(item):
            if self.shape[dim : dim + item.dim()] != item.shape:
                return False
            dim += item.dim()
        else:
            dim += 1
    return dim <= self.dim()


def _count(masks: Sequence[Tensor]) -> list[int]:
    """How many Trues each mask has. Masks on the host are counted there."""
    counts = [mask.count_nonzero() for mask in masks]
    on_device = [
        count for count, mask in zip(counts, masks, strict=True) if is_on_device(mask) and mask.numel()
    ]
    values = iter(_read(*on_device) if on_device else ())
    return [
        (next(values) if mask.numel() else 0) if is_on_device(mask) else int(count)
        for count, mask in zip(counts, masks, strict=True)
    ]


# ---- unique ------------------------------------------------------------------------------------------------

Unique = tuple[Tensor, Tensor, Tensor]


def unique2(
    self: Tensor, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False
) -> Unique:
    """Values in ascending order, whatever `sorted` says, as on the CPU; NaN last, each for itself."""
    if self.numel() == 0 or self.is_complex():
        return on_cpu(_aten._unique2.default, self, sorted, return_inverse, return_counts)
    return _unique(_tpu.group_elements(self, sort=True), return_inverse, return_counts)


def unique(self: Tensor, sorted: bool = True, return_inverse: bool = False) -> tuple[Tensor, Tensor]:
    values, inverse, _ = unique2(self, sorted, return_inverse)
    return values, inverse


def unique_consecutive(
    self: Tensor, return_inverse: bool = False, return_counts: bool = False, dim: int | None = None
) -> Unique:
    if dim is not None and not (self.dim() == 1 and dim in (0, -1)):
        return unique_dim_consecutive(self, dim, return_inverse, return_counts)
    if self.numel() == 0 or self.is_complex():
        return on_cpu(_aten.unique_consecutive.default, self, return_inverse, return_counts, dim)
    return _unique(_tpu.group_elements(self, sort=False), return_inverse, return_counts)


def unique_dim(
    self: Tensor, dim: int, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False
) -> Unique:
    """The unique slices along `dim`, in lexicographic order."""
    if not _has_slices(self, dim):
        return on_cpu(_aten.unique_dim.default, self, dim, sorted, return_inverse, return_counts)
    return _unique_slices(self, dim, True)


def unique_dim_consecutive(
    self: Tensor, dim: int, return_inverse: bool = False, return_counts: bool = False
) -> Unique:
    if not _has_slices(self, dim):
        return on_cpu(_aten.unique_dim_consecutive.default, self, dim, return_inverse, return_counts)
    return _unique_slices(self, dim, False)


def _has_slices(self: Tensor, dim: int) -> bool:
    return self.numel() > 0 and -self.dim() <= dim < self.dim() and not self.is_complex()


def _unique_slices(self: Tensor, dim: int, sort: bool) -> Unique:
    dim %= self.dim()
    # The CPU's kernel computes inverse and counts whether they are asked for or not.
    values, inverse, counts = _unique(_tpu.group_slices(self, dim=dim, sort=sort), True, True)
    return values.movedim(0, dim), inverse, counts


def _unique(grouped: Sequence[Tensor], return_inverse: bool, return_counts: bool) -> Unique:
    """Values, inverse and counts of groups; empty where not asked for."""
    ordered, group, inverse, count = grouped
    del grouped
    nothing = torch.empty(0, dtype=torch.int64, device=ordered.device)
    if not return_inverse:
        inverse = nothing  # dropped before the read, it is not computed
    [number] = _read(count)
    values, counts = _tpu.groups(ordered, group, size=bucket(number, ordered.shape[0]))
    if not return_counts:
        counts = nothing
    values = _head(values, (number, *ordered.shape[1:]))
    return values, inverse, _head(counts, (number,)) if return_counts else nothing


# ---- counts and repeats ------------------------------------------------------------------------------------

_COUNTABLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def bincount(self: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    """How often each number occurs (int64), or the sum of its weights (float32 of float32, else float64)."""

    def refuse() -> Tensor:
        return on_cpu(_aten.bincount.default, self, weights, minlength)

    fits = weights is None or weights.shape == self.shape
    if self.dim() != 1 or self.dtype not in _COUNTABLE or minlength < 0 or not fits or self.numel() == 0:
        return refuse()
    lowest, highest = _read(*(extreme.to(torch.int64) for extreme in self.aminmax()))
    if lowest < 0:
        return refuse()
    length = max(highest + 1, minlength)
    return _head(_tpu.bincount(self, weights, size=bucket(length)), (length,))


def repeat_interleave(repeats: Tensor, *, output_size: int | None = None) -> Tensor:
    """Each position as often as `repeats` says. With `output_size` the lowering serves, without a read."""

    def refuse() -> Tensor:
        return on_cpu(_aten.repeat_interleave.Tensor, repeats, output_size=output_size)

    if repeats.dim() != 1 or repeats.dtype not in (torch.int32, torch.int64) or repeats.numel() == 0:
        return refuse()
    lowest, length = _read(repeats.min().to(torch.int64), repeats.sum())
    if lowest < 0:
        return refuse()
    if length == 0:
        return torch.empty(0, dtype=repeats.dtype, device=repeats.device)
    return _head(_tpu.repeat_positions(repeats, size=bucket(length)), (length,))


# ---- ranks -------------------------------------------------------------------------------------------------


def lstsq(
    self: Tensor, b: Tensor, rcond: float | None = None, *, driver: str | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``linalg.lstsq`` of ``self`` (..., m, n), m > n, and ``b`` (..., m, k) or (..., m).

    The solution lies in a longer one, as LAPACK leaves it; the ranks decide on residuals (one read). On the
    CPU where this platform's compiler has no program for it.
    """
    driver = driver or "gelsy"
    try:
        over_b, residuals, rank, values = _tpu.lstsq_over_b(self, b, rcond, driver=driver)
    except NotImplementedError:
        return on_cpu(_aten.linalg_lstsq.default, self, b, rcond, driver=driver)
    columns = self.shape[-1]
    dim = -1 if over_b.dim() < self.dim() else -2
    size = list(over_b.shape)
    size[dim] = columns
    solution = over_b.as_strided_(size, over_b.stride())
    if driver == "gelsy" or (driver != "gels" and not (rank == columns).all().item()):
        residuals = residuals.new_empty(0)
    return solution, residuals, rank, values


def lstsq_out(
    self: Tensor, b: Tensor, rcond: float | None = None, *, driver: str | None = None, **out: Tensor
) -> tuple[Tensor, ...]:
    """The same into given tensors, which take the sizes of the results."""
    for target, result in zip(out.values(), lstsq(self, b, rcond, driver=driver), strict=True):
        torch._check(
            torch.can_cast(result.dtype, target.dtype),
            lambda target=target, result=result: (
                f"torch.linalg.lstsq: Expected out tensor to have dtype {result.dtype}, got {target.dtype}"
            ),
        )
        target.resize_(result.shape).copy_(result)
    return tuple(out.values())


# ---- embedding_bag -----------------------------------------------------------------------------------------

_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


def embedding_bag_backward(*args: Any) -> Tensor:
    """The sparse gradient. PyTorch's kernel for the CPU is made of other operators: it serves here, too."""
    return _aten._embedding_bag_backward.default.redispatch(_CPU, *args)


# ---- what is registered ------------------------------------------------------------------------------------


def _padded(self: Tensor, *, size: int, dtype: torch.dtype | None = None) -> Tensor:
    return self.new_empty(size, dtype=dtype or self.dtype)


def _infer_slices(self: Tensor, mask: Tensor, *, axis: int, order: list[int], size: int) -> Tensor:
    shape = [*self.shape[:axis], size, *self.shape[axis + mask.dim() :]]
    return self.new_empty([shape[dim] for dim in order])


def _infer_groups(ordered: Tensor, inverse_shape: Sequence[int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    def int64(*shape: int) -> Tensor:
        return ordered.new_empty(shape, dtype=torch.int64)

    return ordered, int64(ordered.shape[0]), int64(*inverse_shape), int64()


def _infer_bincount(self: Tensor, weights: Tensor | None, *, size: int) -> Tensor:
    if weights is None:
        return self.new_empty(size, dtype=torch.int64)
    return self.new_empty(size, dtype=torch.float32 if weights.dtype == torch.float32 else torch.float64)


# Operators of the device itself, lowered in lowering/data_dependent.py: schema -> shape inference.
_PROGRAMS: dict[str, Callable[..., Any]] = {
    "true_indices(Tensor self, Scalar count, *, int size) -> Tensor": (
        lambda self, count, *, size: _padded(self, size=size, dtype=torch.int64)
    ),
    "nonzero_static(Tensor self, *, int size, int fill_value) -> Tensor": (
        lambda self, *, size, fill_value: self.new_empty((size, self.dim()), dtype=torch.int64)
    ),
    "masked_slices(Tensor self, Tensor mask, *, int axis, int[] order, int size) -> Tensor": _infer_slices,
    "masked_elements(Tensor self, Tensor mask, Scalar count, *, int axis, int[] order, int size) -> Tensor": (
        lambda self, mask, count, *, axis, order, size: _padded(self, size=size)
    ),
    "group_elements(Tensor self, *, bool sort) -> (Tensor, Tensor, Tensor, Tensor)": (
        lambda self, *, sort: _infer_groups(self.new_empty(self.numel()), self.shape)
    ),
    "group_slices(Tensor self, *, int dim, bool sort) -> (Tensor, Tensor, Tensor, Tensor)": (
        lambda self, *, dim, sort: _infer_groups(
            self.new_empty(self.movedim(dim, 0).shape), (self.shape[dim],)
        )
    ),
    "groups(Tensor ordered, Tensor group, *, int size) -> (Tensor, Tensor)": (
        lambda ordered, group, *, size: (
            ordered.new_empty(size, *ordered.shape[1:]),
            group.new_empty(size),
        )
    ),
    "bincount(Tensor self, Tensor? weights, *, int size) -> Tensor": _infer_bincount,
    # Lowered in lowering/linalg.py.
    "lstsq_over_b(Tensor self, Tensor b, float? rcond, *, str? driver) -> (Tensor, Tensor, Tensor, Tensor)": (
        lambda self, b, rcond, *, driver: lstsq_results(self, b, driver)
    ),
    "repeat_positions(Tensor repeats, *, int size) -> Tensor": (
        lambda repeats, *, size: _padded(repeats, size=size)
    ),
}

_LSTSQ = "Tensor self, Tensor b, float? rcond=None, *, str? driver=None"

_DYNAMIC_FORMS: dict[str, Callable[..., Any]] = {
    "dynamic_index.Tensor(Tensor self, Tensor?[] indices) -> Tensor": index,
    "dynamic_index.Tensor_out(Tensor self, Tensor?[] indices, *, Tensor(a!) out) -> Tensor(a!)": index_out,
    "dynamic_repeat_interleave.Tensor(Tensor repeats, *, SymInt? output_size=None) -> Tensor": (
        repeat_interleave
    ),
    "dynamic__embedding_bag_backward(Tensor grad, Tensor indices, Tensor offsets, Tensor offset2bag, "
    "Tensor bag_size, Tensor maximum_indices, SymInt num_weights, bool scale_grad_by_freq, int mode, "
    "bool sparse, Tensor? per_sample_weights, int padding_idx=-1) -> Tensor": embedding_bag_backward,
    f"dynamic_linalg_lstsq({_LSTSQ}) -> (Tensor, Tensor, Tensor, Tensor)": lstsq,
    f"dynamic_linalg_lstsq.out({_LSTSQ}, Tensor(a!) solution, Tensor(b!) residuals, Tensor(c!) rank, "
    "Tensor(d!) singular_values) -> (Tensor(a!), Tensor(b!), Tensor(c!), Tensor(d!))": lstsq_out,
}

_KERNELS: dict[str, Callable[..., Any]] = {
    "nonzero": nonzero,
    "nonzero.out": nonzero_out,
    "nonzero_static": nonzero_static,
    "nonzero_static.out": nonzero_static_out,
    "masked_select": masked_select,
    "masked_select.out": masked_select_out,
    "_unique": unique,
    "_unique2": unique2,
    "unique_dim": unique_dim,
    "unique_consecutive": unique_consecutive,
    "unique_dim_consecutive": unique_dim_consecutive,
    "bincount": bincount,
}
