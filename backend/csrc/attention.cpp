// Scaled dot-product attention: PyTorch's own composite, its results laid out as those of the CPU's fused kernel. What
// comes after it may be a view that only this layout allows: (B, H, L, E) back to (B, L, H * E) is one.
#include <ATen/ATen.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <ATen/ops/scaled_dot_product_attention_native.h>
#include <torch/library.h>

namespace tpu {
namespace {

// Whether the CPU has its fused kernel for it (use_flash_attention_cpp in PyTorch's sdp_utils_cpp.cpp).
bool is_fused_on_cpu(const sdp::sdp_params& params) {
  constexpr bool debug = false; // tells nobody why not
  const auto &query = params.query, &key = params.key, &value = params.value;
  return sdp::check_runtime_disabled_flash(params, debug) && sdp::check_for_dropout(params, debug) &&
      sdp::check_tensor_shapes(params, debug) &&
      sdp::check_batch_size_and_num_heads_dense</*supports_gqa=*/true, /*requires_same_num_heads=*/false>(
             params, debug) &&
      sdp::check_attn_mask_shape(params, debug) && query.sym_size(3) == key.sym_size(3) &&
      query.sym_size(3) == value.sym_size(3) && sdp::check_nonzero_sequence_lengths_dense(params, debug) &&
      query.sym_stride(3) == 1 && key.sym_stride(3) == 1 && value.sym_stride(3) == 1;
}

// (B, H, L, E) in the memory order of (B, L, H, E): all heads of a position beside each other.
at::Tensor with_heads_innermost(const at::Tensor& tensor) {
  return tensor.transpose(1, 2).contiguous().transpose(1, 2);
}

// The same tensor, its gradient in that order.
at::Tensor with_such_gradient(const at::Tensor& tensor) {
  if (!at::GradMode::is_enabled() || !tensor.requires_grad()) {
    return tensor;
  }
  auto same = tensor.alias();
  same.register_hook(
      [](const at::Tensor& gradient) { return gradient.defined() ? with_heads_innermost(gradient) : gradient; });
  return same;
}

at::Tensor scaled_dot_product_attention(
    const at::Tensor& query,
    const at::Tensor& key,
    const at::Tensor& value,
    const std::optional<at::Tensor>& mask,
    double dropout,
    bool is_causal,
    std::optional<double> scale,
    bool enable_gqa) {
  const auto attend = [&](const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
    return at::native::scaled_dot_product_attention(q, k, v, mask, dropout, is_causal, scale, enable_gqa);
  };
  if (!is_fused_on_cpu({query, key, value, mask, dropout, is_causal, enable_gqa})) {
    return attend(query, key, value);
  }
  const auto output = attend(with_such_gradient(query), with_such_gradient(key), with_such_gradient(value));
  const auto head = query.sym_stride(1), position = query.sym_stride(2);
  return head > 0 && head < position ? with_heads_innermost(output) : output;
}

} // namespace
} // namespace tpu

namespace {
// In inference mode there is no autograd key: the composite kernel is the same for both.
TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) {
  m.impl("scaled_dot_product_attention", &tpu::scaled_dot_product_attention);
}
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("scaled_dot_product_attention", &tpu::scaled_dot_product_attention);
}
} // namespace
