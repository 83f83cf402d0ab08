// Nested tensors of layout torch.strided: the buffer is a tensor of the device, sizes and offsets are on the host.
//
// PyTorch's attention over jagged tensors makes them too. The kernels below are made of other operators, and PyTorch's
// devices share them. The others read memory; they are refused by name.
#include "aten/shared_kernels.h"

#include <ATen/ATen.h>

namespace tpu {
namespace {

constexpr const char* kNested =
    "_nested_from_padded_and_nested_example _nested_select_backward _nested_tensor_size "
    "_nested_tensor_storage_offsets _nested_tensor_strides _safe_softmax _softmax _softmax_backward_data _to_copy "
    "abs abs_ add.Tensor add_.Tensor alias all.dim bmm cat chunk clone copy_ cos detach div.Scalar div.Tensor "
    "embedding empty_like eq.Scalar eq.Tensor fill_.Scalar fill_.Tensor ge.Scalar gelu gelu_ gelu_backward gt.Scalar "
    "is_same_size isinf isnan isneginf isposinf linear linear_backward logical_not logical_not_ masked_fill.Scalar "
    "matmul.out matmul_backward mul.Scalar mul.Tensor mul_.Scalar mul_.Tensor narrow native_dropout "
    "native_dropout_backward neg neg_ normal_ ones_like relu relu_ select.int sgn sgn_ silu silu_ silu_backward sin "
    "split_with_sizes sqrt squeeze squeeze.dim squeeze.dims sub.Tensor tanh tanh_ threshold_backward to_padded_tensor "
    "transpose.int unbind.int unsqueeze value_selecting_reduction_backward values view where.self where.self_out zero_";

void refuse_nested(const c10::OperatorHandle& op, torch::jit::Stack*) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      false,
      op.operator_name(),
      " is not there for nested tensors of layout torch.strided on tpu; make them with layout=torch.jagged, or call "
      "to_padded_tensor() first");
}

// The rows without their padding. PyTorch's own selects them by a mask, which leaves a storage larger than the rows
// here, and nested tensors take all of a storage.
at::Tensor nested_from_padded(const at::Tensor& padded, const at::Tensor& sizes, bool fuse_transform_0213) {
  const auto dense = fuse_transform_0213 ? padded.transpose(1, 2).flatten(2) : padded;
  std::vector<at::Tensor> rows;
  for (int64_t i = 0; i < sizes.size(0); ++i) {
    auto row = dense.select(0, i);
    for (int64_t dim = 0; dim < sizes.size(1); ++dim) {
      row = row.narrow(dim, 0, sizes[i][dim].item<int64_t>());
    }
    rows.push_back(row.reshape({-1}));
  }
  const auto buffer = rows.empty() ? dense.new_empty({0}) : at::cat(rows);
  const auto [strides, offsets] = at::_nested_compute_contiguous_strides_offsets(sizes);
  return at::_nested_view_from_buffer(buffer, sizes, strides, offsets);
}

// Row by row, for the same reason: PyTorch's own pads, multiplies and selects.
at::Tensor nested_matmul(const at::Tensor& self, const at::Tensor& other) {
  TORCH_CHECK(
      self.is_nested() && other.is_nested() && self.dim() == other.dim() && self.dim() >= 3 &&
          self.size(0) == other.size(0),
      "matmul: Expected both to be nested, of the same number of dimensions (3 or more) and of the same number of "
      "rows");
  std::vector<at::Tensor> rows;
  const auto left = self.unbind();
  const auto right = other.unbind();
  for (size_t i = 0; i < left.size(); ++i) {
    rows.push_back(at::matmul(left[i], right[i]));
  }
  return at::_nested_tensor_from_tensor_list(rows);
}

} // namespace
} // namespace tpu

namespace {

TORCH_LIBRARY_IMPL(_, NestedTensorPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&tpu::refuse_nested>());
}

// Of a dense tensor.
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  tpu::share<c10::DispatchKey::CPU>(m, "_nested_view_from_buffer");
  m.impl("_nested_from_padded", &tpu::nested_from_padded);
}

TORCH_LIBRARY_IMPL(aten, NestedTensorPrivateUse1, m) {
  tpu::share<c10::DispatchKey::NestedTensorCPU>(m, tpu::kNested);
  m.impl("matmul", &tpu::nested_matmul);
}

} // namespace
