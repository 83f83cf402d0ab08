// Scaled dot-product attention. Where the CPU has a fused kernel, it is recorded as one operation with a backward of
// its own, under the name of CUDA's memory-efficient kernel: tensor and context parallelism know that one. All else
// is PyTorch's composite, as on the CPU. Results are laid out as the CPU's. What comes after them may be a view that
// only this layout allows: (B, H, L, E) back to (B, L, H * E) is one.
#include <ATen/ATen.h>
#include <ATen/OpMathType.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <ATen/ops/scaled_dot_product_attention_native.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <limits>
#include <string_view>
#include <tuple>
#include <vector>

namespace tpu {
namespace {

// Whether the CPU has its fused kernel for it (use_flash_attention_cpp in PyTorch's sdp_utils_cpp.cpp), dropout aside,
// and values of another size than keys, as latent attention has them.
bool is_fused_on_cpu(const sdp::sdp_params& params) {
  constexpr bool debug = false; // tells nobody why not
  const auto &query = params.query, &key = params.key, &value = params.value;
  return (sdp::check_runtime_disabled_flash(params, debug) ||
          sdp::check_runtime_disabled_mem_efficient(params, debug)) &&
      sdp::check_tensor_shapes(params, debug) &&
      sdp::check_batch_size_and_num_heads_dense</*supports_gqa=*/true, /*requires_same_num_heads=*/false>(
             params, debug) &&
      sdp::check_attn_mask_shape(params, debug) && query.sym_size(3) == key.sym_size(3) && query.sym_size(3) > 0 &&
      sdp::check_nonzero_sequence_lengths_dense(params, debug) && query.sym_stride(3) == 1 && key.sym_stride(3) == 1 &&
      value.sym_stride(3) == 1;
}

// Dtypes that do not go together are refused by PyTorch's composite.
bool has_fitting_dtypes(const sdp::sdp_params& params) {
  const auto dtype = params.query.scalar_type();
  const auto& mask = params.attn_mask;
  const bool fits = !mask || mask->scalar_type() == at::kBool || mask->scalar_type() == dtype ||
      (mask->scalar_type() == at::kFloat && at::isReducedFloatingType(dtype));
  return at::isFloatingType(dtype) && params.key.scalar_type() == dtype && params.value.scalar_type() == dtype && fits;
}

// Whether derivatives are asked for that the operation lacks: forward ones, those of torch.func and of its batches.
bool is_transformed(const at::Tensor& tensor) {
  return tensor.key_set().has_any(
             c10::DispatchKeySet({c10::DispatchKey::FuncTorchGradWrapper, c10::DispatchKey::FuncTorchBatched})) ||
      tensor._fw_grad(/*level=*/0).defined();
}

bool is_subclass(const at::Tensor& tensor) {
  return tensor.key_set().has(c10::DispatchKey::Python);
}

bool is_dtensor(const at::Tensor& tensor) {
  if (!is_subclass(tensor)) {
    return false;
  }
  pybind11::gil_scoped_acquire gil;
  const auto object = pybind11::reinterpret_steal<pybind11::object>(THPVariable_Wrap(tensor));
  return std::string_view(Py_TYPE(object.ptr())->tp_name) == "DTensor";
}

// Whether dropout is part of the operation: PyTorch's composite refuses other numbers, and DTensor has no rule for it.
bool has_own_dropout(const sdp::sdp_params& params) {
  return params.dropout > 0 && params.dropout <= 1 && !is_dtensor(params.query);
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

// Where a query sees a key by a mask of integers (B or 1, 1, W, N), which says of what document each is. N = S: the
// queries are the keys. N = L + S: first come the queries. N = L + S + 1: the place of the first query among the keys
// follows, which counts if the mask is causal, too. So does W > 1: so many keys a query sees, its own place included.
at::Tensor
is_seen_by_documents(const at::Tensor& mask, const c10::SymInt& queries, const c10::SymInt& keys, bool is_causal) {
  const auto size = mask.sym_size(-1), window = mask.sym_size(-2);
  const auto documents = mask.narrow_symint(-2, 0, 1);
  const auto of_queries = documents.narrow_symint(-1, 0, queries);
  const auto of_keys = size == keys ? of_queries : documents.narrow_symint(-1, queries, keys);
  auto is_seen = of_queries.transpose(-2, -1) == of_keys;
  const bool has_place = size > queries + keys;
  if (!is_causal || (!has_place && window == 1)) {
    return is_seen;
  }
  auto distance = at::arange(queries, mask.options()).unsqueeze(-1) - at::arange(keys, mask.options());
  if (has_place) {
    distance = distance + documents.narrow_symint(-1, queries + keys, 1);
    is_seen = is_seen.logical_and(distance >= 0);
  }
  return window == 1 ? is_seen : is_seen.logical_and(distance < window);
}

// What the operation computes, made of others that have all derivatives. It scales the scores, where PyTorch's
// composite scales query and key by the square root each, with a rounding more in each factor.
at::Tensor composite(
    const at::Tensor& query,
    const at::Tensor& key,
    const at::Tensor& value,
    const std::optional<at::Tensor>& mask,
    bool is_causal,
    std::optional<double> scale) {
  const auto opmath = at::toOpMathType(query.scalar_type()); // 16 bit would round or overflow before it is scaled
  const auto for_every_head = [&](const at::Tensor& tensor) {
    const auto groups = query.sym_size(1) / tensor.sym_size(1);
    return groups == 1 ? tensor.to(opmath) : tensor.to(opmath).repeat_interleave_symint(groups, 1);
  };
  auto scores =
      at::matmul(query.to(opmath), for_every_head(key).transpose(-2, -1)) * sdp::calculate_scale(query, scale);
  const auto infinity = std::numeric_limits<double>::infinity();
  const auto queries = query.sym_size(-2), keys = key.sym_size(-2);
  const bool is_documents = mask && at::isIntegralType(mask->scalar_type(), /*includeBool=*/false);
  if (is_causal && !(is_documents && mask->sym_size(-1) > queries + keys)) {
    const auto is_seen = at::ones_symint({queries, keys}, query.options().dtype(at::kBool)).tril();
    scores = scores.masked_fill(is_seen.logical_not(), -infinity);
  }
  if (mask && at::isFloatingType(mask->scalar_type())) {
    scores = scores + *mask;
  } else if (mask) {
    const auto is_seen = is_documents ? is_seen_by_documents(*mask, queries, keys, is_causal) : *mask;
    scores = scores.masked_fill(is_seen.logical_not(), -infinity);
  }
  return at::matmul(at::_safe_softmax(scores, -1), for_every_head(value)).to(query.scalar_type());
}

// Attention with dropout. It has no second derivative: that would need the dropped weights again. The schemas are those
// of dropout_attention.py.
struct DropoutAttention : torch::autograd::Function<DropoutAttention> {
  static at::Tensor forward(
      torch::autograd::AutogradContext* context,
      const at::Tensor& query,
      const at::Tensor& key,
      const at::Tensor& value,
      const std::optional<at::Tensor>& mask,
      double dropout,
      bool is_causal,
      std::optional<double> scale) {
    static const auto op = c10::Dispatcher::singleton()
                               .findSchemaOrThrow("tpu::dropout_attention", "")
                               .typed<std::tuple<at::Tensor, at::Tensor, at::Tensor>(
                                   const at::Tensor&,
                                   const at::Tensor&,
                                   const at::Tensor&,
                                   const std::optional<at::Tensor>&,
                                   double,
                                   bool,
                                   std::optional<double>)>();
    at::AutoDispatchBelowADInplaceOrView guard;
    auto [output, log_sums, drawn] = op.call(query, key, value, mask, dropout, is_causal, scale);
    context->save_for_backward({query, key, value, mask.value_or(at::Tensor()), output, log_sums, drawn});
    context->saved_data["dropout"] = dropout;
    context->saved_data["is_causal"] = is_causal;
    context->saved_data["scale"] = scale;
    return output;
  }

  static torch::autograd::variable_list
  backward(torch::autograd::AutogradContext* context, const torch::autograd::variable_list& grads) {
    static const auto op = c10::Dispatcher::singleton()
                               .findSchemaOrThrow("tpu::dropout_attention_backward", "")
                               .typed<std::tuple<at::Tensor, at::Tensor, at::Tensor>(
                                   const at::Tensor&,
                                   const at::Tensor&,
                                   const at::Tensor&,
                                   const at::Tensor&,
                                   const std::optional<at::Tensor>&,
                                   const at::Tensor&,
                                   const at::Tensor&,
                                   const at::Tensor&,
                                   double,
                                   bool,
                                   std::optional<double>)>();
    const auto saved = context->get_saved_variables();
    const auto &query = saved[0], &key = saved[1], &value = saved[2], &mask = saved[3];
    const auto given = {grads[0], query, key, value};
    const bool may_be_differentiated = at::GradMode::is_enabled() &&
        std::any_of(given.begin(), given.end(), [](const at::Tensor& each) { return each.requires_grad(); });
    TORCH_CHECK_NOT_IMPLEMENTED(
        !may_be_differentiated,
        "scaled_dot_product_attention with dropout has no second derivatives: differentiate without create_graph, or "
        "within torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)");
    at::AutoDispatchBelowADInplaceOrView guard;
    auto [grad_query, grad_key, grad_value] = op.call(
        grads[0],
        query,
        key,
        value,
        mask.defined() ? std::make_optional(mask) : std::nullopt,
        saved[4],
        saved[5],
        saved[6],
        context->saved_data["dropout"].toDouble(),
        context->saved_data["is_causal"].toBool(),
        context->saved_data["scale"].toOptional<double>());
    return {grad_query, grad_key, grad_value, {}, {}, {}, {}};
  }
};

at::Tensor scaled_dot_product_attention(
    const at::Tensor& query,
    const at::Tensor& key,
    const at::Tensor& value,
    const std::optional<at::Tensor>& mask,
    double dropout,
    bool is_causal,
    std::optional<double> scale,
    bool enable_gqa) {
  const sdp::sdp_params params{query, key, value, mask, dropout, is_causal, enable_gqa};
  if (!is_fused_on_cpu(params)) {
    return at::native::scaled_dot_product_attention(query, key, value, mask, dropout, is_causal, scale, enable_gqa);
  }
  const auto given = {query, key, value, mask.value_or(at::Tensor())};
  const bool needs_composite = std::any_of(
      given.begin(), given.end(), [](const at::Tensor& each) { return each.defined() && is_transformed(each); });
  if (!has_fitting_dtypes(params) || (dropout != 0 && (needs_composite || !has_own_dropout(params)))) {
    return at::native::scaled_dot_product_attention(query, key, value, mask, dropout, is_causal, scale, enable_gqa);
  }
  if (dropout != 0) {
    return DropoutAttention::apply(query, key, value, mask, dropout, is_causal, scale);
  }
  at::Tensor output;
  if (needs_composite) {
    output = composite(
        with_such_gradient(query), with_such_gradient(key), with_such_gradient(value), mask, is_causal, scale);
    const auto head = query.sym_stride(1), position = query.sym_stride(2);
    return head > 0 && head < position ? with_heads_innermost(output) : output;
  }
  auto bias = mask;
  if (bias && is_subclass(query)) { // DTensor splits it as the scores
    bias = bias->expand_symint({query.sym_size(0), query.sym_size(1), query.sym_size(2), key.sym_size(2)});
  }
  const bool has_gradient =
      at::GradMode::is_enabled() && std::any_of(given.begin(), given.end(), [](const at::Tensor& each) {
        return each.defined() && each.requires_grad();
      });
  return std::get<0>(at::_scaled_dot_product_efficient_attention(
      query, key, value, bias, /*compute_log_sumexp=*/has_gradient, dropout, is_causal, scale));
}

using Gradients = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

// The backward's own autograd: where somebody may differentiate the gradients, they are those of the composite.
Gradients backward_with_gradients(
    const at::Tensor& grad_out,
    const at::Tensor& query,
    const at::Tensor& key,
    const at::Tensor& value,
    const at::Tensor& bias,
    const at::Tensor& out,
    const at::Tensor& logsumexp,
    const at::Tensor& seed,
    const at::Tensor& offset,
    double dropout,
    std::array<bool, 4> wanted,
    bool is_causal,
    std::optional<double> scale) {
  const std::array<at::Tensor, 4> inputs{query, key, value, bias};
  const auto has_gradient = [](const at::Tensor& each) {
    return each.defined() && each.requires_grad();
  };
  if (!at::GradMode::is_enabled() ||
      !(has_gradient(grad_out) || std::any_of(inputs.begin(), inputs.end(), has_gradient))) {
    at::AutoDispatchBelowADInplaceOrView guard;
    return at::_scaled_dot_product_efficient_attention_backward(
        grad_out, query, key, value, bias, out, logsumexp, seed, offset, dropout, wanted, is_causal, scale);
  }
  // Of a part of the keys (context parallelism) logsumexp knows more than can be computed here.
  TORCH_CHECK_NOT_IMPLEMENTED(
      !is_subclass(query) && !is_subclass(grad_out),
      "scaled_dot_product_attention has no second derivatives of DTensors: differentiate without create_graph");
  std::array<at::Tensor, 4> gradients;
  std::vector<at::Tensor> sources;
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (wanted[i]) {
      sources.push_back(inputs[i]);
    }
  }
  const auto mask = bias.defined() ? std::make_optional(bias) : std::nullopt;
  const auto output = composite(query, key, value, mask, is_causal, scale);
  const auto found = torch::autograd::grad({output}, sources, {grad_out}, /*retain_graph=*/true, /*create_graph=*/true);
  for (size_t i = 0, next = 0; i < inputs.size(); ++i) {
    if (wanted[i]) {
      gradients[i] = found[next++];
    }
  }
  return {gradients[0], gradients[1], gradients[2], gradients[3]};
}

} // namespace
} // namespace tpu

namespace {
// In inference mode there is no autograd key: the composite kernel is the same for both.
TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) {
  m.impl("scaled_dot_product_attention", &tpu::scaled_dot_product_attention);
  m.impl("_scaled_dot_product_efficient_attention_backward", &tpu::backward_with_gradients);
}
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("scaled_dot_product_attention", &tpu::scaled_dot_product_attention);
}
} // namespace
