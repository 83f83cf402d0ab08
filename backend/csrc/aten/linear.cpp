// A linear layer is one operation, and its gradients are another. PyTorch's composite makes them of products and sums,
// with views of each operand in between: in strict mode three programs for the gradients, in every mode more for the
// host to do. On a TPU joining the rows copies them, unless their number is a multiple of 8.
#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/linear_native.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/generated/Functions.h>
#include <torch/library.h>

#include <array>
#include <tuple>

namespace tpu {
namespace {

// Whether it is a tensor of the device and nothing more: no subclass, no wrapper of torch.func, not sparse.
bool is_plain(const at::Tensor& tensor) {
  static const auto kPlain = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1) |
      c10::getAutogradRelatedKeySetFromBackend(c10::BackendComponent::PrivateUse1Bit) |
      c10::getAutocastRelatedKeySetFromBackend(c10::BackendComponent::PrivateUse1Bit);
  return (tensor.key_set() | kPlain) == kPlain && !tensor._fw_grad(/*level=*/0).defined();
}

bool may_be_plain(const at::Tensor& tensor) {
  return !tensor.defined() || is_plain(tensor);
}

// Whether somebody looks at each operation: a mode of Python, a transform of torch.func.
bool is_watched() {
  static const auto kWatchers = c10::DispatchKeySet(
                                    {c10::DispatchKey::Python,
                                     c10::DispatchKey::PythonTLSSnapshot,
                                     c10::DispatchKey::Functionalize,
                                     c10::DispatchKey::Tracer}) |
      c10::functorch_transforms_ks;
  return c10::impl::tls_local_dispatch_key_set().included_.has_any(kWatchers);
}

// What does not fit is left to the composite, which says why.
bool fits_one_operation(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias) {
  // A tensor that is only traced has no numbers for its sizes: so they come last.
  const auto is_alike = [&](const at::Tensor& tensor) {
    return is_plain(tensor) && tensor.scalar_type() == input.scalar_type() && tensor.is_contiguous();
  };
  return !is_watched() && at::isFloatingType(input.scalar_type()) && is_alike(input) && is_alike(weight) &&
      (!bias.defined() || is_alike(bias)) && input.dim() >= 2 && weight.dim() == 2 &&
      input.size(-1) == weight.size(1) && (!bias.defined() || (bias.dim() == 1 && bias.size(0) == weight.size(0))) &&
      input.numel() > 0 && weight.numel() > 0;
}

at::Tensor record_linear(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
  static const auto op =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("tpu::linear", "")
          .typed<at::Tensor(const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&)>();
  at::AutoDispatchBelowADInplaceOrView guard;
  return op.call(input, weight, bias);
}

at::Tensor linear(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& given_bias) {
  const auto bias = given_bias.value_or(at::Tensor());
  if (!fits_one_operation(input, weight, bias)) {
    return at::native::linear(input, weight, given_bias);
  }
  auto output = record_linear(input, weight, given_bias);
  if (!torch::autograd::compute_requires_grad(input, weight, bias)) {
    return output;
  }
  auto backward = c10::make_intrusive<torch::autograd::generated::LinearBackward0>();
  backward->set_next_edges(torch::autograd::collect_next_edges(input, weight, bias));
  if (weight.requires_grad()) {
    backward->input_ = torch::autograd::SavedVariable(input, /*is_output=*/false);
  }
  if (input.requires_grad()) {
    backward->weight_ = torch::autograd::SavedVariable(weight, /*is_output=*/false);
  }
  torch::autograd::set_history(output, backward);
  return output;
}

at::Tensor meta(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>&) {
  TORCH_CHECK(
      input.dim() >= 1 && weight.dim() == 2 && input.size(-1) == weight.size(1),
      "tpu::linear: expected (..., K) and (N, K), got ",
      input.sizes(),
      " and ",
      weight.sizes());
  auto sizes = input.sizes().vec();
  sizes.back() = weight.size(0);
  return at::empty(sizes, input.options());
}

using LinearGradients = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

// Where somebody looks at them, or differentiates them, the gradients are made of other operations.
LinearGradients
composite(const at::Tensor& input, const at::Tensor& gradient, const at::Tensor& weight, std::array<bool, 3> wanted) {
  const auto rows = gradient.reshape_symint({-1, gradient.sym_size(-1)});
  LinearGradients gradients;
  if (wanted[0]) {
    std::get<0>(gradients) = at::matmul(gradient, weight);
  }
  if (wanted[1]) {
    std::get<1>(gradients) = rows.t().mm(input.reshape_symint({-1, input.sym_size(-1)}));
  }
  if (wanted[2]) {
    std::get<2>(gradients) = rows.sum(0);
  }
  return gradients;
}

LinearGradients linear_backward(
    const at::Tensor& input, const at::Tensor& gradient, const at::Tensor& weight, std::array<bool, 3> wanted) {
  const bool is_differentiated = torch::autograd::compute_requires_grad(input, gradient, weight);
  if (is_differentiated || is_watched() || !may_be_plain(input) || !is_plain(gradient) || !may_be_plain(weight)) {
    return composite(input, gradient, weight, wanted);
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  return at::linear_backward(input, gradient, weight, wanted);
}

} // namespace
} // namespace tpu

namespace {
TORCH_LIBRARY_FRAGMENT(tpu, m) {
  // Contiguous operands of one dtype of floats: (..., K), (N, K), (N). The result is (..., N).
  m.def("linear(Tensor self, Tensor weight, Tensor? bias) -> Tensor");
}

TORCH_LIBRARY_IMPL(tpu, Meta, m) {
  m.impl("linear", &tpu::meta);
}

// Where the device cannot compile it.
TORCH_LIBRARY_IMPL(tpu, CPU, m) {
  m.impl("linear", [](const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
    return at::linear(input, weight, bias);
  });
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) {
  m.impl("linear", &tpu::linear);
  m.impl("linear_backward", &tpu::linear_backward);
}
} // namespace
