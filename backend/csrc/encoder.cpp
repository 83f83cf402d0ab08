// nn.MultiheadAttention and nn.TransformerEncoderLayer in evaluation: what PyTorch's CPU and CUDA have one kernel for,
// as the operators that it stands for.
#include "record.h"

#include <ATen/ATen.h>
#include <ATen/native/CPUFallback.h>
#include <torch/library.h>

#include <cmath>
#include <limits>

namespace tpu {
namespace {

using OptionalTensor = std::optional<at::Tensor>;

// True in `mask` leaves a position out.  By type: 0 (L, L), 1 (B, L) of keys, 2 (B, heads, L, L), as PyTorch has them.
at::Tensor left_out(const at::Tensor& mask, std::optional<int64_t> type) {
  const auto is_masked = mask.to(at::kBool);
  return type == 1 ? is_masked.unsqueeze(1).unsqueeze(1) : is_masked;
}

// Self-attention of (B, L, E), not projected yet, and its weights (B, heads, L, L).
std::pair<at::Tensor, at::Tensor> attend(
    const at::Tensor& input,
    int64_t num_heads,
    const at::Tensor& qkv_weight,
    const at::Tensor& qkv_bias,
    const OptionalTensor& mask,
    std::optional<int64_t> mask_type) {
  const auto batch = input.size(0), length = input.size(1), width = input.size(2);
  const auto heads = at::linear(input, qkv_weight, qkv_bias)
                         .view({batch, length, 3, num_heads, width / num_heads})
                         .permute({2, 0, 3, 1, 4})
                         .unbind(0); // each (B, heads, L, width / heads)
  auto scores = at::matmul(heads[0] / std::sqrt(static_cast<double>(width / num_heads)), heads[1].transpose(-2, -1));
  if (mask.has_value() && mask->defined()) {
    scores = scores.masked_fill(left_out(*mask, mask_type), -std::numeric_limits<double>::infinity());
  }
  const auto weights = at::softmax(scores, -1);
  return {at::matmul(weights, heads[2]).transpose(1, 2).reshape({batch, length, width}), weights};
}

std::tuple<at::Tensor, at::Tensor> native_multi_head_attention(
    const at::Tensor& query,
    const at::Tensor& key,
    const at::Tensor& value,
    int64_t width,
    int64_t num_heads,
    const at::Tensor& qkv_weight,
    const at::Tensor& qkv_bias,
    const at::Tensor& proj_weight,
    const at::Tensor& proj_bias,
    const OptionalTensor& mask,
    bool need_weights,
    bool average_weights,
    std::optional<int64_t> mask_type) {
  if (!query.is_same(key) || !key.is_same(value)) {
    return at::native::call_fallback_fn<&cpu_fallback, at::_ops::_native_multi_head_attention>::call(
        query, key, value, width, num_heads, qkv_weight, qkv_bias, proj_weight, proj_bias, mask, need_weights,
        average_weights, mask_type);
  }
  const auto [attended, weights] = attend(query, num_heads, qkv_weight, qkv_bias, mask, mask_type);
  const auto output = at::linear(attended, proj_weight, proj_bias);
  if (!need_weights) {
    return {output, at::Tensor()};
  }
  return {output, average_weights ? weights.mean(1) : weights};
}

at::Tensor transformer_encoder_layer(
    const at::Tensor& src,
    int64_t,
    int64_t num_heads,
    const at::Tensor& qkv_weight,
    const at::Tensor& qkv_bias,
    const at::Tensor& proj_weight,
    const at::Tensor& proj_bias,
    bool use_gelu,
    bool norm_first,
    double eps,
    const at::Tensor& norm_weight_1,
    const at::Tensor& norm_bias_1,
    const at::Tensor& norm_weight_2,
    const at::Tensor& norm_bias_2,
    const at::Tensor& ffn_weight_1,
    const at::Tensor& ffn_bias_1,
    const at::Tensor& ffn_weight_2,
    const at::Tensor& ffn_bias_2,
    const OptionalTensor& mask,
    std::optional<int64_t> mask_type) {
  const auto norm_1 = [&](const at::Tensor& x) {
    return at::layer_norm(x, {src.size(-1)}, norm_weight_1, norm_bias_1, eps);
  };
  const auto norm_2 = [&](const at::Tensor& x) {
    return at::layer_norm(x, {src.size(-1)}, norm_weight_2, norm_bias_2, eps);
  };
  const auto attention = [&](const at::Tensor& x) {
    return at::linear(attend(x, num_heads, qkv_weight, qkv_bias, mask, mask_type).first, proj_weight, proj_bias);
  };
  const auto feed_forward = [&](const at::Tensor& x) {
    const auto hidden = at::linear(x, ffn_weight_1, ffn_bias_1);
    return at::linear(use_gelu ? at::gelu(hidden) : at::relu(hidden), ffn_weight_2, ffn_bias_2);
  };
  if (norm_first) {
    const auto attended = src + attention(norm_1(src));
    return attended + feed_forward(norm_2(attended));
  }
  const auto attended = norm_1(src + attention(src));
  return norm_2(attended + feed_forward(attended));
}

// nn.TransformerEncoder asks before it makes nested tensors of a padded batch, which the device lacks: it stays padded.
bool nested_tensor_from_mask_left_aligned(const at::Tensor&, const at::Tensor&) {
  return false;
}

at::Tensor nested_tensor_from_mask(const at::Tensor&, const at::Tensor&, bool) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      false,
      "nested tensors are not on the tpu device: leave nn.TransformerEncoder's mask_check on, or pass "
      "enable_nested_tensor=False");
}

} // namespace
} // namespace tpu

namespace {
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_nested_tensor_from_mask", &tpu::nested_tensor_from_mask);
  m.impl("_native_multi_head_attention", &tpu::native_multi_head_attention);
  m.impl("_nested_tensor_from_mask_left_aligned", &tpu::nested_tensor_from_mask_left_aligned);
  m.impl("_transformer_encoder_layer_fwd", &tpu::transformer_encoder_layer);
}
} // namespace
