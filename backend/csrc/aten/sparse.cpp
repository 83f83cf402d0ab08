// Sparse tensors: indices and values are tensors of the device. PyTorch keeps layout and sizes.
//
// There are three kinds of kernels:
// - Those that PyTorch's CPU and CUDA devices share are made of other operators. They serve here too (`run_shared`).
// - Those that read memory and that training needs are in Python, made of recorded operators (composite/sparse.py).
// - The rest runs on the CPU, counted like every fallback.
#include "aten/shared_kernels.h"
#include "device/device.h"
#include "record/record.h"

#include <ATen/ATen.h>
#include <ATen/SparseCsrTensorImpl.h>
#include <ATen/SparseCsrTensorUtils.h>
#include <ATen/native/SparseTensorUtils.h>
#include <torch/library.h>

namespace tpu {
namespace {

using c10::DispatchKey;
using torch::jit::Stack;

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

// What a fallback computed, back into a sparse argument.
at::Tensor copy_sparse_from(const at::Tensor& self, const at::Tensor& dst) {
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

// ---- what PyTorch's devices share. Not all of it: some of those kernels end in one that reads memory.

constexpr const char* kElementwise =
    "abs asin asinh atan atanh ceil deg2rad erf erfinv expm1 floor frac log1p neg rad2deg round sgn sign sin sinh "
    "sqrt tan tanh trunc";

constexpr const char* kShared =
    "add.Tensor add_.Tensor clone conj_physical.out copy_ dense_dim empty.memory_format empty_like is_pinned isinf "
    "isnan isneginf isneginf.out isposinf isposinf.out mm mm.out mul.Tensor mul_.Tensor relu relu_ "
    "resize_as_sparse_ signbit signbit.out sparse_dim sum sum.dim_IntList threshold_backward "
    "threshold_backward.grad_input values zero_ _nnz _to_dense _to_sparse _to_sparse.sparse_dim";

constexpr const char* kSharedCoo =
    "any cat copy_sparse_to_sparse_ div.Tensor div.Tensor_mode div.out div.out_mode div_.Tensor div_.Tensor_mode "
    "floor_divide floor_divide.out floor_divide_.Tensor indices is_coalesced mv nan_to_num nan_to_num.out "
    "nan_to_num_ narrow_copy native_norm native_norm.ScalarOpt_dim_dtype norm.ScalarOpt_dim "
    "norm.ScalarOpt_dim_dtype permute pow.Tensor_Scalar pow.Tensor_Scalar_out sparse_resize_ "
    "sparse_resize_and_clear_ sub.Tensor sub.out sub_.Tensor unsqueeze view_as_complex view_as_real zeros.out "
    "_coalesced_ _dimI _dimV _indices _sparse_broadcast_to _sparse_coo_tensor_with_dims "
    "_sparse_coo_tensor_with_dims_and_tensors _to_sparse_bsc _to_sparse_bsr _to_sparse_csc _to_sparse_csr _values";

constexpr const char* kSharedCompressed =
    "angle angle.out ccol_indices col_indices conj_physical_ crow_indices fill_.Scalar mul.Scalar mul_.Scalar "
    "normal_ resize_ row_indices select.int select_copy.int _conj_physical";

// Of a dense tensor.
constexpr const char* kConversions =
    "_to_sparse _to_sparse.sparse_dim _to_sparse_bsc _to_sparse_bsr _to_sparse_csc _to_sparse_csr";

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

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  tpu::share<DispatchKey::CPU>(m, tpu::kConversions);
}

TORCH_LIBRARY_IMPL(aten, SparsePrivateUse1, m) {
  tpu::share<DispatchKey::SparseCPU>(m, tpu::kElementwise, {"", "_", ".out"});
  tpu::share<DispatchKey::SparseCPU>(m, tpu::kShared);
  tpu::share<DispatchKey::SparseCPU>(m, tpu::kSharedCoo);
  m.impl("_copy_from_and_resize", &tpu::copy_sparse_from);
}

TORCH_LIBRARY_IMPL(aten, SparseCsrPrivateUse1, m) {
  tpu::share<DispatchKey::SparseCsrCPU>(m, tpu::kElementwise, {"", "_", ".out"});
  tpu::share<DispatchKey::SparseCsrCPU>(m, tpu::kShared);
  tpu::share<DispatchKey::SparseCsrCPU>(m, tpu::kSharedCompressed);
  m.impl("_copy_from_and_resize", &tpu::copy_sparse_from);
}

} // namespace
