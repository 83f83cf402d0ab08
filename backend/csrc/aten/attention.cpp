// Scaled dot-product attention: a composite, where the CPU has a fused kernel its results laid out as that one's. What
// comes after it may be a view that only this layout allows: (B, H, L, E) back to (B, L, H * E) is one.
#include <ATen/ATen.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <ATen/ops/scaled_dot_product_attention_native.h>
#include <torch/library.h>

#include <limits>

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

// What the CPU's fused kernel computes: it scales the scores, where PyTorch's composite scales query and key by the
// square root each, with a rounding more in each factor.
at::Tensor attend_as_fused(
    const at::Tensor& query,
    const at::Tensor& key,
    const at::Tensor& value,
    const std::optional<at::Tensor>& mask,
    bool is_causal,
    std::optional<double> scale) {
  auto scores = at::matmul(query, key.transpose(-2, -1)) * sdp::calculate_scale(query, scale);
  const auto infinity = std::numeric_limits<double>::infinity();
  if (is_causal) {
    const auto is_seen =
        at::ones_symint({query.sym_size(-2), key.sym_size(-2)}, query.options().dtype(at::kBool)).tril();
    scores = scores.masked_fill(is_seen.logical_not(), -infinity);
  } else if (mask) {
    scores = mask->scalar_type() == at::kBool ? scores.masked_fill(mask->logical_not(), -infinity) : scores + *mask;
  }
  return at::matmul(at::_safe_softmax(scores, -1), value);
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
  if (!is_fused_on_cpu({query, key, value, mask, dropout, is_causal, enable_gqa})) {
    return at::native::scaled_dot_product_attention(
        query, key, value, mask, dropout, is_causal, scale, enable_gqa);
  }
  // In 16 bit the scores would be rounded, or overflow, before they are scaled. Dtypes that do not go together are
  // refused by PyTorch's composite.
  const auto dtype = query.scalar_type();
  const bool scales_scores = (dtype == at::kFloat || dtype == at::kDouble) && key.scalar_type() == dtype &&
      value.scalar_type() == dtype && (!mask || mask->scalar_type() == at::kBool || mask->scalar_type() == dtype);
  const auto for_every_head = [&](const at::Tensor& tensor) {
    const auto same = with_such_gradient(tensor);
    return enable_gqa ? same.repeat_interleave_symint(query.sym_size(1) / tensor.sym_size(1), 1) : same;
  };
  const auto output = scales_scores
      ? attend_as_fused(
            with_such_gradient(query), for_every_head(key), for_every_head(value), mask, is_causal, scale)
      : at::native::scaled_dot_product_attention(
            with_such_gradient(query),
            with_such_gradient(key),
            with_such_gradient(value),
            mask,
            dropout,
            is_causal,
            scale,
            enable_gqa);
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
