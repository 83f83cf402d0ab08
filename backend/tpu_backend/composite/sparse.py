"""Sparse tensors: the kernels that read memory on PyTorch's devices and that training needs.

PyTorch's shared kernels and the fallback to the CPU are in csrc/aten/sparse.cpp. The CPU serves the forms
that the kernels here do not, and raises the errors of wrong arguments.
"""

import math

import torch
from torch import Tensor

from tpu_backend import _C
from tpu_backend.composite.outputs import assign
from tpu_backend.on_cpu import on_cpu

_aten = torch.ops.aten
_copy_from_and_resize = _aten._copy_from_and_resize.default
_make = _aten._sparse_coo_tensor_unsafe.default


def _on_cpu_into(out, op, *args, **kwargs):
    return _copy_from_and_resize(on_cpu(op, *args, **kwargs, out=out), out)


def _is_coo(value):
    # PyTorch hands a tensor that it has made of a number over as the number.
    return isinstance(value, Tensor) and value.is_sparse


# ---- COO: coalesce, add, multiply, mask


def _gather(dense, sparse):
    """The elements of `dense` at the indices of `sparse`, in the form of its values."""
    if sparse.sparse_dim() == 0:
        return dense.unsqueeze(0).expand(sparse._values().shape).clone()
    return dense[sparse._indices().unbind(0)]


def _like(sparse, indices, values, is_coalesced):
    return _make(indices, values, sparse.shape, is_coalesced=is_coalesced)


def _with_values(sparse, values):
    return _like(sparse, sparse._indices().clone(), values, sparse.is_coalesced())


def _flatten_indices(sparse):
    """The place of each index in its sparse dims, row by row. PyTorch's own needs a kernel that we lack."""
    indices = sparse._indices()
    if sparse.sparse_dim() == 0:
        return indices.new_zeros(indices.shape[1])
    places, *others = indices.unbind(0)
    for index, size in zip(others, sparse.shape[1:]):
        places = places.mul(size).add(index)
    return places


def _unflatten_indices(places, sizes):
    if len(sizes) == 1:
        return places.unsqueeze(0)
    indices = []
    for size in reversed(sizes):
        indices.insert(0, places.remainder(size))
        places = places.floor_divide(size)
    return torch.stack(indices) if indices else places.new_empty((0, places.shape[0]))


def coalesce(self):
    """One read: of how many indices differ."""
    if self._nnz() < 2:
        return self.clone()._coalesced_(True)
    values = self._values()
    places, group, _ = torch._unique2(_flatten_indices(self), sorted=True, return_inverse=True)
    dtype = torch.int64 if values.dtype == torch.bool else values.dtype
    sums = values.new_zeros((places.shape[0], *values.shape[1:]), dtype=dtype)
    sums = sums.index_add_(0, group, values.to(dtype)).to(values.dtype)
    return _like(self, _unflatten_indices(places, self.shape[: self.sparse_dim()]), sums, True)


def _density(sparse):
    return sparse.sparse_dim(), sparse.dense_dim()


def add_out(self, other, *, alpha=1, out):
    dtype = torch.result_type(self, other)
    fits = (
        _is_coo(other)
        and isinstance(self, Tensor)
        and self.is_sparse == out.is_sparse
        and self.shape == other.shape
        and torch.can_cast(dtype, out.dtype)
        and not isinstance(alpha, bool)
        and (alpha == 1 or torch.can_cast(torch.result_type(self, alpha), dtype))
    )
    if not fits or (self.is_sparse and _density(self) != _density(other)):
        return _on_cpu_into(out, _aten.add.out, self, other, alpha=alpha)
    values = other._values().to(dtype)
    values = values if alpha == 1 else values.mul(alpha).to(dtype)
    if self.is_sparse:
        return _copy_from_and_resize(_add_sparse(self, values, other), out)
    return _add_to_dense(self, values, other, out)


def _add_to_dense(dense, values, sparse, out):
    in_place = dense is out and values.dtype == out.dtype
    total = out if in_place else dense.to(values.dtype, copy=True)
    if sparse.sparse_dim() == 0:
        total.add_(values.sum(0, dtype=values.dtype))
    else:
        total.index_put_(sparse._indices().unbind(0), values, accumulate=True)
    return out if in_place else assign(out, total)


def _add_sparse(self, values, other):
    """All entries of both, without a read.

    The sum is coalesced (one read) where both were, as on the CPU, or where there are more entries than
    places for them: momentum adds to the same tensor in every step.
    """
    indices = torch.cat([self._indices(), other._indices()], 1)
    total = _like(self, indices, torch.cat([self._values().to(values.dtype), values]), False)
    is_full = indices.shape[1] > math.prod(self.shape[: self.sparse_dim()])
    return total.coalesce() if is_full or (self.is_coalesced() and other.is_coalesced()) else total


def mul_out(self, other, *, out):
    """By a number, or by a dense tensor of the same size."""
    dtype = torch.result_type(self, other)
    sparse, factor = (self, other) if _is_coo(self) else (other, self)
    factor = torch.as_tensor(factor, dtype=dtype)
    fits = factor.layout == torch.strided and factor.shape in ((), sparse.shape)
    if not (fits and out.is_sparse and torch.can_cast(dtype, out.dtype)):
        return _on_cpu_into(out, _aten.mul.out, self, other)
    if factor.dim() == 0 and sparse is out:
        out._values().mul_(factor)
        return out
    product = sparse._values().to(dtype).mul(_gather(factor, sparse) if factor.dim() else factor)
    return _copy_from_and_resize(_with_values(sparse, product), out)


def _look_up(sparse, mask):
    """The values of `sparse` at the indices of `mask`, 0 where it has none."""
    known, wanted = _flatten_indices(sparse), _flatten_indices(mask)
    places = torch.searchsorted(known, wanted).clamp_max(sparse._nnz() - 1)
    values = sparse._values().index_select(0, places)
    found = known.index_select(0, places).eq(wanted)
    return torch.where(found.view(-1, *[1] * (values.dim() - 1)), values, values.new_zeros(()))


def sparse_mask(self, mask):
    fits = mask.is_sparse and self.shape == mask.shape
    if fits and self.layout == torch.strided:
        return _with_values(mask, _gather(self, mask))
    if fits and self.is_sparse and _density(self) == _density(mask) and self._nnz() and mask.sparse_dim():
        return _with_values(mask, _look_up(self.coalesce(), mask))
    return on_cpu(_aten.sparse_mask.default, self, mask)


# ---- matrix product of a sparse and a dense matrix


def _is_plain_product(self, mat1, mat2):
    if mat1.layout not in (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc):
        return False
    sizes = mat1.shape[0], mat2.shape[-1]
    return (
        self.layout == mat2.layout == torch.strided
        and _density(mat1) == (2, 0)
        and mat2.dim() == 2
        and mat1.shape[1] == mat2.shape[0]
        and self.dtype == mat1.dtype == mat2.dtype
        and self.dim() <= 2
        and all(size in (1, wanted) for size, wanted in zip(self.shape[::-1], sizes[::-1]))
    )


def _plain_addmm(self, mat1, mat2, beta, alpha):
    coordinates = mat1 if mat1.is_sparse else mat1._to_sparse()
    rows, columns = coordinates._indices()
    terms = mat2.index_select(0, columns).mul(coordinates._values().unsqueeze(1))
    product = mat2.new_zeros((mat1.shape[0], mat2.shape[1])).index_add_(0, rows, terms)
    product = product if alpha == 1 else product.mul(alpha)
    return product if beta == 0 else product.add(self, alpha=beta)


def addmm(self, mat1, mat2, *, beta=1, alpha=1):
    if _is_plain_product(self, mat1, mat2):
        return _plain_addmm(self, mat1, mat2, beta, alpha)
    return on_cpu(_aten.addmm.default, self, mat1, mat2, beta=beta, alpha=alpha)


def addmm_out(self, mat1, mat2, *, beta=1, alpha=1, out):
    if out.layout == torch.strided and _is_plain_product(self, mat1, mat2):
        return assign(out, _plain_addmm(self, mat1, mat2, beta, alpha))
    return _on_cpu_into(out, _aten.addmm.out, self, mat1, mat2, beta=beta, alpha=alpha)


def addmm_(self, mat1, mat2, *, beta=1, alpha=1):
    return self.copy_(addmm(self, mat1, mat2, beta=beta, alpha=alpha))


# ---- compressed layouts


def _by_way_of_coo(op):
    """The conversion of a plain matrix to CSR or CSC."""

    def convert(self, dense_dim=None):
        is_plain = self.layout in (torch.sparse_csr, torch.sparse_csc) and _density(self) == (2, 0)
        return op(self._to_sparse(), dense_dim) if is_plain else on_cpu(op, self, dense_dim)

    return convert


def mm_reduce(self, other, reduce):
    """The CPU's kernel notes where each maximum came from only if an argument requires a gradient, which a
    fallback's copies would not.
    """
    host = [tensor.cpu().requires_grad_(tensor.requires_grad) for tensor in (self, other)]
    results = _aten._sparse_mm_reduce_impl(*host, reduce)
    _C.count_fallback("aten::_sparse_mm_reduce_impl")
    return tuple(result.to(self.device) for result in results)


_PRODUCTS = {"addmm": addmm, "addmm.out": addmm_out}
COO_KERNELS = _PRODUCTS | {
    "_coalesce": coalesce,
    "add.out": add_out,
    "addmm_": addmm_,
    "mul.out": mul_out,
    "sparse_mask": sparse_mask,
}
COMPRESSED_KERNELS = _PRODUCTS | {
    "_sparse_mm_reduce_impl": mm_reduce,
    "_to_sparse_csc": _by_way_of_coo(_aten._to_sparse_csc.default),
    "_to_sparse_csr": _by_way_of_coo(_aten._to_sparse_csr.default),
}
