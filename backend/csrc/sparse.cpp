// Sparse tensors: indices and values are tensors of the device, the rest is metadata that PyTorch keeps.
//
// Three kinds of kernels.  Those that PyTorch's CPU and CUDA devices share are made of other operators, so they serve
// here as well (`run_shared`).  Those that read memory and that training needs are written here, of operators that are
// recorded.  The rest runs on the CPU, counted like every fallback.
#include "device.h"
#include "record.h"

#include <ATen/ATen.h>
#include <ATen/SparseCsrTensorImpl.h>
#include <ATen/SparseCsrTensorUtils.h>
#include <ATen/native/BinaryOps.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/native/SparseTensorUtils.h>
#include <torch/library.h>

namespace tpu {
namespace {

using c10::DispatchKey;
using torch::jit::Stack;

// ---- the kernels of others

// For kernels that only call other operators on indices and values.
template <DispatchKey kernel>
void run_shared(const c10::OperatorHandle& op, Stack* stack) {
  Device::get().ensure_initialized();
  op.callBoxedForDispatchKey(kernel, *stack);
}

template <DispatchKey kernel>
void run_sparse_on_cpu(const c10::OperatorHandle& op, Stack* stack) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      op.hasKernelForDispatchKey(kernel),
      op.operator_name(),
      ": PyTorch has no kernel for ",
      kernel == DispatchKey::SparseCPU ? "sparse COO" : "sparse CSR, CSC, BSR and BSC",
      " tensors; call to_dense() first, or apply it to the values alone");
  run_on_cpu(op, stack, kernel);
}

template <class Op, DispatchKey kernel = DispatchKey::SparseCPU, class... Args>
decltype(auto) on_cpu(Args&&... args) {
  return at::native::call_fallback_fn<&run_sparse_on_cpu<kernel>, Op>::call(std::forward<Args>(args)...);
}

// What a fallback computed, back into a sparse argument.
at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& dst) {
  TORCH_CHECK(self.layout() == dst.layout(), "a ", self.layout(), " result does not fit a ", dst.layout(), " tensor");
  const auto moved = self.to(dst.options());
  if (self.is_sparse()) {
    auto* impl = at::sparse::get_sparse_impl(dst);
    impl->resize_and_clear_(moved.sparse_dim(), moved.dense_dim(), moved.sizes());
    impl->set_indices_and_values_unsafe(moved._indices(), moved._values());
    impl->set_coalesced(moved.is_coalesced());
  } else {
    const auto [compressed, plain] = at::sparse_csr::getCompressedPlainIndices(moved);
    static_cast<at::SparseCsrTensorImpl*>(dst.unsafeGetTensorImpl())
        ->set_member_tensors(compressed, plain, moved.values(), moved.sizes());
  }
  return dst;
}

// ---- COO: coalesce, add, multiply, mask

// One index tensor for each sparse dim, as index() and index_put_() take them.
c10::List<std::optional<at::Tensor>> index_list(const at::Tensor& sparse) {
  c10::List<std::optional<at::Tensor>> list;
  for (auto& index : sparse._indices().unbind(0)) {
    list.push_back(std::move(index));
  }
  return list;
}

// The elements of `dense` at the indices of `sparse`, in the form of its values.
at::Tensor gather(const at::Tensor& dense, const at::Tensor& sparse) {
  if (sparse.sparse_dim() == 0) {
    return dense.unsqueeze(0).expand(sparse._values().sizes()).clone();
  }
  return at::index(dense, index_list(sparse));
}

at::Tensor like(const at::Tensor& sparse, const at::Tensor& indices, const at::Tensor& values, bool is_coalesced) {
  return at::_sparse_coo_tensor_unsafe(
      indices, values, sparse.sizes(), values.options().layout(at::kSparse), is_coalesced);
}

// The place of each index in its sparse dims, row by row.  PyTorch's own asks for a kernel that we lack.
at::Tensor flatten_indices(const at::Tensor& sparse) {
  const auto indices = sparse._indices();
  at::Tensor places = at::zeros({indices.size(1)}, indices.options());
  for (int64_t dim = 0; dim < indices.size(0); ++dim) {
    places = dim == 0 ? indices.select(0, 0) : places.mul(sparse.size(dim)).add(indices.select(0, dim));
  }
  return places;
}

at::Tensor unflatten_indices(at::Tensor places, at::IntArrayRef sizes) {
  if (sizes.size() == 1) {
    return places.unsqueeze(0);
  }
  std::vector<at::Tensor> indices(sizes.size());
  for (size_t dim = sizes.size(); dim-- > 0;) {
    indices[dim] = places.remainder(sizes[dim]);
    places = places.floor_divide(sizes[dim]);
  }
  return sizes.empty() ? at::empty({0, places.size(0)}, places.options()) : at::stack(indices);
}

// One read: of how many indices differ.
at::Tensor coalesce(const at::Tensor& self) {
  if (self._nnz() < 2) {
    return self.clone()._coalesced_(true);
  }
  const auto values = self._values();
  const auto places = flatten_indices(self);
  const auto [unique, group, _] = at::_unique2(places, /*sorted=*/true, /*return_inverse=*/true);
  auto sizes = values.sizes().vec();
  sizes[0] = unique.size(0);
  const auto type = values.scalar_type() == at::kBool ? at::kLong : values.scalar_type();
  const auto sums = at::zeros(sizes, values.options().dtype(type)).index_add_(0, group, values.to(type));
  const auto indices = unflatten_indices(unique, self.sizes().slice(0, self.sparse_dim()));
  return like(self, indices, sums.to(values.scalar_type()), /*is_coalesced=*/true);
}

at::Tensor scaled_values(const at::Tensor& sparse, at::ScalarType type, const at::Scalar& alpha) {
  const auto values = sparse._values().to(type);
  return alpha.equal(1) ? values : values.mul(alpha).to(type);
}

at::Tensor& add_to_dense(const at::Tensor& dense, const at::Tensor& sparse, const at::Scalar& alpha, at::Tensor& out) {
  const auto type = at::result_type(dense, sparse);
  const bool in_place = at::sparse::is_same_tensor(dense, out) && type == out.scalar_type();
  at::Tensor sum = in_place ? out : dense.to(type, /*non_blocking=*/false, /*copy=*/true);
  const auto values = scaled_values(sparse, type, alpha);
  if (sparse.sparse_dim() == 0) {
    sum.add_(values.sum(0, /*keepdim=*/false, type));
  } else {
    sum.index_put_(index_list(sparse), values, /*accumulate=*/true);
  }
  if (!in_place) {
    at::native::resize_output(out, sum.sizes());
    out.copy_(sum);
  }
  return out;
}

// All entries of both, without a read; coalesced (one read) where both were, as on the CPU, or where there are more
// entries than places for them: momentum adds to the same tensor in every step.
at::Tensor& add_sparse(const at::Tensor& self, const at::Tensor& other, const at::Scalar& alpha, at::Tensor& out) {
  const auto type = at::result_type(self, other);
  const auto indices = at::cat({self._indices(), other._indices()}, 1);
  const auto values = at::cat({self._values().to(type), scaled_values(other, type, alpha)}, 0);
  auto sum = like(self, indices, values, /*is_coalesced=*/false);
  const auto places = c10::multiply_integers(self.sizes().slice(0, self.sparse_dim()));
  if ((self.is_coalesced() && other.is_coalesced()) || indices.size(1) > places) {
    sum = sum.coalesce();
  }
  copy_from_and_resize(sum, out);
  return out;
}

at::Tensor& add_out(const at::Tensor& self, const at::Tensor& other, const at::Scalar& alpha, at::Tensor& out) {
  TORCH_CHECK(
      other.is_sparse() && self.is_sparse() == out.is_sparse(),
      "add(sparse, dense) is not supported. Use add(dense, sparse) instead.");
  TORCH_CHECK(
      self.sizes() == other.sizes(),
      "add: expected 'self' and 'other' to have same size, but self has size ",
      self.sizes(),
      " while other has size ",
      other.sizes(),
      " (FYI: addition with a sparse tensor does not broadcast)");
  const auto type = at::result_type(self, other);
  TORCH_CHECK(
      at::canCast(type, out.scalar_type()),
      "Can't convert result type ",
      type,
      " to output ",
      out.scalar_type(),
      " in add operation");
  at::native::alpha_check(type, alpha);
  if (!self.is_sparse()) {
    return add_to_dense(self, other, alpha, out);
  }
  TORCH_CHECK(
      at::sparse::is_same_density(self, other),
      "add: expected 'self' and 'other' to have same density, but 'self' has ",
      self.sparse_dim(),
      " sparse dimensions while 'other' has ",
      other.sparse_dim(),
      " sparse dimensions");
  return add_sparse(self, other, alpha, out);
}

// By a number, or by a dense tensor of the same size; the CPU has the rest.
at::Tensor& mul_out(const at::Tensor& self, const at::Tensor& other, at::Tensor& out) {
  const auto& sparse = self.is_sparse() ? self : other;
  const auto& dense = self.is_sparse() ? other : self;
  const auto type = at::result_type(self, other);
  const bool by_number = dense.layout() == at::kStrided && dense.dim() == 0;
  if (!out.is_sparse() || dense.layout() != at::kStrided || !at::canCast(type, out.scalar_type()) ||
      !(by_number || dense.sizes() == sparse.sizes())) {
    return on_cpu<ATEN_OP2(mul, out)>(self, other, out);
  }
  const auto factor = by_number ? dense : gather(dense, sparse);
  if (by_number && at::sparse::is_same_tensor(sparse, out)) {
    out._values().mul_(factor);
    return out;
  }
  const auto product = sparse._values().to(type).mul(factor.to(type));
  copy_from_and_resize(like(sparse, sparse._indices().clone(), product, sparse.is_coalesced()), out);
  return out;
}

// The values of `sparse` at the indices of `mask`, 0 where it has none.
at::Tensor look_up(const at::Tensor& sparse, const at::Tensor& mask) {
  const auto known = flatten_indices(sparse), wanted = flatten_indices(mask);
  const auto places = at::searchsorted(known, wanted).clamp_max(sparse._nnz() - 1);
  auto found = known.index_select(0, places).eq(wanted);
  const auto values = sparse._values().index_select(0, places);
  for (int64_t dim = 1; dim < values.dim(); ++dim) {
    found = found.unsqueeze(-1);
  }
  return at::where(found, values, at::zeros({}, values.options()));
}

at::Tensor sparse_mask(const at::Tensor& self, const at::Tensor& mask) {
  if (!mask.is_sparse() || self.sizes() != mask.sizes()) {
    return on_cpu<ATEN_OP(sparse_mask)>(self, mask);
  }
  if (self.layout() == at::kStrided) {
    return like(mask, mask._indices().clone(), gather(self, mask), mask.is_coalesced());
  }
  if (!self.is_sparse() || !at::sparse::is_same_density(self, mask) || self._nnz() == 0 || mask.sparse_dim() == 0) {
    return on_cpu<ATEN_OP(sparse_mask)>(self, mask);
  }
  return like(mask, mask._indices().clone(), look_up(self.coalesce(), mask), mask.is_coalesced());
}

// ---- matrix product of a sparse and a dense matrix

// Row and column of each value: (2, nnz).
at::Tensor coordinates(const at::Tensor& matrix) {
  if (matrix.is_sparse()) {
    return matrix._indices();
  }
  const auto [compressed, plain] = at::sparse_csr::getCompressedPlainIndices(matrix);
  return at::_convert_indices_from_csr_to_coo(
      compressed, plain, /*out_int32=*/false, /*transpose=*/matrix.layout() == at::kSparseCsc);
}

bool is_plain_product(const at::Tensor& self, const at::Tensor& mat1, const at::Tensor& mat2) {
  const bool has_coordinates =
      mat1.layout() == at::kSparse || mat1.layout() == at::kSparseCsr || mat1.layout() == at::kSparseCsc;
  return self.layout() == at::kStrided && mat2.layout() == at::kStrided && has_coordinates && mat1.dim() == 2 &&
      mat1.dense_dim() == 0 && mat1.sparse_dim() == 2 && mat2.dim() == 2 && mat1.size(1) == mat2.size(0) &&
      mat1.scalar_type() == mat2.scalar_type() && self.scalar_type() == mat1.scalar_type() && self.dim() <= 2 &&
      at::is_expandable_to(self.sizes(), {mat1.size(0), mat2.size(1)});
}

at::Tensor plain_addmm(
    const at::Tensor& self,
    const at::Tensor& mat1,
    const at::Tensor& mat2,
    const at::Scalar& beta,
    const at::Scalar& alpha) {
  const auto places = coordinates(mat1);
  const auto values = mat1.is_sparse() ? mat1._values() : mat1.values();
  const auto terms = mat2.index_select(0, places.select(0, 1)).mul(values.unsqueeze(1));
  auto product = at::zeros({mat1.size(0), mat2.size(1)}, mat2.options()).index_add_(0, places.select(0, 0), terms);
  if (!alpha.equal(1)) {
    product = product.mul(alpha);
  }
  return beta.equal(0) ? product : product.add(self, beta);
}

template <DispatchKey kernel>
at::Tensor addmm(
    const at::Tensor& self,
    const at::Tensor& mat1,
    const at::Tensor& mat2,
    const at::Scalar& beta,
    const at::Scalar& alpha) {
  return is_plain_product(self, mat1, mat2) ? plain_addmm(self, mat1, mat2, beta, alpha)
                                            : on_cpu<ATEN_OP(addmm), kernel>(self, mat1, mat2, beta, alpha);
}

template <DispatchKey kernel>
at::Tensor& addmm_out(
    const at::Tensor& self,
    const at::Tensor& mat1,
    const at::Tensor& mat2,
    const at::Scalar& beta,
    const at::Scalar& alpha,
    at::Tensor& out) {
  if (!is_plain_product(self, mat1, mat2) || out.layout() != at::kStrided) {
    return on_cpu<ATEN_OP2(addmm, out), kernel>(self, mat1, mat2, beta, alpha, out);
  }
  const auto result = plain_addmm(self, mat1, mat2, beta, alpha);
  at::native::resize_output(out, result.sizes());
  return out.copy_(result);
}

at::Tensor& addmm_(
    at::Tensor& self, const at::Tensor& mat1, const at::Tensor& mat2, const at::Scalar& beta, const at::Scalar& alpha) {
  return is_plain_product(self, mat1, mat2) ? self.copy_(plain_addmm(self, mat1, mat2, beta, alpha))
                                            : on_cpu<ATEN_OP(addmm_)>(self, mat1, mat2, beta, alpha);
}

// ---- embedding_bag

// What the recorder calls for a sparse gradient, which its programs do not return (data_dependent in op.h).
void embedding_bag_backward(const c10::OperatorHandle&, Stack* stack) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::_embedding_bag_backward", "");
  op.callBoxedForDispatchKey(DispatchKey::CPU, *stack); // made of other operators
}

// ---- compressed layouts

bool is_plain_matrix(const at::Tensor& self) {
  return self.dim() == 2 && self.dense_dim() == 0 &&
      (self.layout() == at::kSparseCsr || self.layout() == at::kSparseCsc);
}

at::Tensor to_csr(const at::Tensor& self, std::optional<int64_t> dense_dim) {
  return is_plain_matrix(self) ? self._to_sparse()._to_sparse_csr(dense_dim)
                               : on_cpu<ATEN_OP(_to_sparse_csr), DispatchKey::SparseCsrCPU>(self, dense_dim);
}

at::Tensor to_csc(const at::Tensor& self, std::optional<int64_t> dense_dim) {
  return is_plain_matrix(self) ? self._to_sparse()._to_sparse_csc(dense_dim)
                               : on_cpu<ATEN_OP(_to_sparse_csc), DispatchKey::SparseCsrCPU>(self, dense_dim);
}

// The CPU's kernel notes where each maximum came from only if an argument requires a gradient; a fallback's copies
// would not.
std::tuple<at::Tensor, at::Tensor> mm_reduce(const at::Tensor& self, const at::Tensor& other, std::string_view reduce) {
  const auto host_self = self.cpu().set_requires_grad(self.requires_grad());
  const auto host_other = other.cpu().set_requires_grad(other.requires_grad());
  const auto [result, places] = at::_sparse_mm_reduce_impl(host_self, host_other, reduce);
  Device::get().count_fallback("aten::_sparse_mm_reduce_impl");
  return {result.to(self.device()), places.to(self.device())};
}

// ---- what PyTorch's devices share. Not all that they do: some of these kernels end in one that reads memory.

constexpr const char* kElementwise[] = {
    "abs",   "asin", "asinh",   "atan",  "atanh", "ceil", "deg2rad", "erf",  "erfinv", "expm1", "floor", "frac",
    "log1p", "neg",  "rad2deg", "round", "sgn",   "sign", "sin",     "sinh", "sqrt",   "tan",   "tanh",  "trunc",
};

constexpr const char* kShared[] = {
    "add.Tensor",
    "add_.Tensor",
    "clone",
    "conj_physical.out",
    "copy_",
    "dense_dim",
    "empty.memory_format",
    "empty_like",
    "is_pinned",
    "isinf",
    "isnan",
    "isneginf",
    "isneginf.out",
    "isposinf",
    "isposinf.out",
    "mm",
    "mm.out",
    "mul.Tensor",
    "mul_.Tensor",
    "relu",
    "relu_",
    "resize_as_sparse_",
    "signbit",
    "signbit.out",
    "sparse_dim",
    "sum",
    "sum.dim_IntList",
    "threshold_backward",
    "threshold_backward.grad_input",
    "values",
    "zero_",
    "_nnz",
    "_to_dense",
    "_to_sparse",
    "_to_sparse.sparse_dim",
};

constexpr const char* kSharedCoo[] = {
    "any",
    "cat",
    "copy_sparse_to_sparse_",
    "div.Tensor",
    "div.Tensor_mode",
    "div.out",
    "div.out_mode",
    "div_.Tensor",
    "div_.Tensor_mode",
    "floor_divide",
    "floor_divide.out",
    "floor_divide_.Tensor",
    "indices",
    "is_coalesced",
    "mv",
    "nan_to_num",
    "nan_to_num.out",
    "nan_to_num_",
    "narrow_copy",
    "native_norm",
    "native_norm.ScalarOpt_dim_dtype",
    "norm.ScalarOpt_dim",
    "norm.ScalarOpt_dim_dtype",
    "permute",
    "pow.Tensor_Scalar",
    "pow.Tensor_Scalar_out",
    "sparse_resize_",
    "sparse_resize_and_clear_",
    "sub.Tensor",
    "sub.out",
    "sub_.Tensor",
    "unsqueeze",
    "view_as_complex",
    "view_as_real",
    "zeros.out",
    "_coalesced_",
    "_dimI",
    "_dimV",
    "_indices",
    "_sparse_broadcast_to",
    "_sparse_coo_tensor_with_dims",
    "_sparse_coo_tensor_with_dims_and_tensors",
    "_to_sparse_bsc",
    "_to_sparse_bsr",
    "_to_sparse_csc",
    "_to_sparse_csr",
    "_values",
};

constexpr const char* kSharedCompressed[] = {
    "angle",
    "angle.out",
    "ccol_indices",
    "col_indices",
    "conj_physical_",
    "crow_indices",
    "fill_.Scalar",
    "mul.Scalar",
    "mul_.Scalar",
    "normal_",
    "resize_",
    "row_indices",
    "select.int",
    "select_copy.int",
    "_conj_physical",
};

// Of a dense tensor.
constexpr const char* kConversions[] = {
    "_to_sparse",
    "_to_sparse.sparse_dim",
    "_to_sparse_bsc",
    "_to_sparse_bsr",
    "_to_sparse_csc",
    "_to_sparse_csr",
};

template <DispatchKey kernel>
void share(torch::Library& m, c10::ArrayRef<const char*> names) {
  for (const char* name : names) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_shared<kernel>>());
  }
}

template <DispatchKey kernel>
void share_elementwise(torch::Library& m) {
  for (const std::string name : kElementwise) {
    for (const auto& form : {name, name + "_", name + ".out"}) {
      m.impl(form.c_str(), torch::CppFunction::makeFromBoxedFunction<&run_shared<kernel>>());
    }
  }
}

} // namespace
} // namespace tpu

namespace {

using c10::DispatchKey;

TORCH_LIBRARY_IMPL(_, SparsePrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&tpu::run_sparse_on_cpu<DispatchKey::SparseCPU>>());
}
TORCH_LIBRARY_IMPL(_, SparseCsrPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&tpu::run_sparse_on_cpu<DispatchKey::SparseCsrCPU>>());
}

TORCH_LIBRARY_FRAGMENT(tpu, m) {
  m.def(
      "dynamic__embedding_bag_backward(Tensor grad, Tensor indices, Tensor offsets, Tensor offset2bag, "
      "Tensor bag_size, Tensor maximum_indices, SymInt num_weights, bool scale_grad_by_freq, int mode, bool sparse, "
      "Tensor? per_sample_weights, int padding_idx=-1) -> Tensor",
      torch::CppFunction::makeFromBoxedFunction<&tpu::embedding_bag_backward>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  tpu::share<DispatchKey::CPU>(m, tpu::kConversions);
}

TORCH_LIBRARY_IMPL(aten, SparsePrivateUse1, m) {
  tpu::share_elementwise<DispatchKey::SparseCPU>(m);
  tpu::share<DispatchKey::SparseCPU>(m, tpu::kShared);
  tpu::share<DispatchKey::SparseCPU>(m, tpu::kSharedCoo);
  m.impl("_coalesce", &tpu::coalesce);
  m.impl("_copy_from_and_resize", &tpu::copy_from_and_resize);
  m.impl("add.out", &tpu::add_out);
  m.impl("addmm", &tpu::addmm<DispatchKey::SparseCPU>);
  m.impl("addmm.out", &tpu::addmm_out<DispatchKey::SparseCPU>);
  m.impl("addmm_", &tpu::addmm_);
  m.impl("mul.out", &tpu::mul_out);
  m.impl("sparse_mask", &tpu::sparse_mask);
}

TORCH_LIBRARY_IMPL(aten, SparseCsrPrivateUse1, m) {
  tpu::share_elementwise<DispatchKey::SparseCsrCPU>(m);
  tpu::share<DispatchKey::SparseCsrCPU>(m, tpu::kShared);
  tpu::share<DispatchKey::SparseCsrCPU>(m, tpu::kSharedCompressed);
  m.impl("_copy_from_and_resize", &tpu::copy_from_and_resize);
  m.impl("addmm", &tpu::addmm<DispatchKey::SparseCsrCPU>);
  m.impl("addmm.out", &tpu::addmm_out<DispatchKey::SparseCsrCPU>);
  m.impl("_sparse_mm_reduce_impl", &tpu::mm_reduce);
  m.impl("_to_sparse_csc", &tpu::to_csc);
  m.impl("_to_sparse_csr", &tpu::to_csr);
}

} // namespace
