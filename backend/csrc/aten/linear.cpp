// A linear layer whose gradients are one operation. PyTorch's composite makes them of two products and a sum, with
// views of each operand in between: in strict mode three programs, in every mode more for the host to do.
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

bool is_fused(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias) {
  // A tensor that is only traced has no numbers for its sizes: so they come last.
  const bool has_gradient = at::GradMode::is_enabled() &&
      (input.requires_grad() || weight.requires_grad() || (bias.defined() && bias.requires_grad()));
  const auto is_alike = [&](const at::Tensor& tensor) {
    return is_plain(tensor) && tensor.scalar_type() == input.scalar_type() && tensor.is_contiguous();
  };
  return has_gradient && !is_watched() && at::isFloatingType(input.scalar_type()) && is_alike(input) &&
      is_alike(weight) && (!bias.defined() || (is_alike(bias) && bias.dim() == 1)) && input.dim() >= 2 &&
      weight.dim() == 2 && input.numel() > 0 && weight.numel() > 0;
}

// An entry of the stream notes which of its operands require a gradient.
at::Tensor view_of(const at::Tensor& tensor, at::Tensor view) {
  view.unsafeGetTensorImpl()->set_requires_grad(tensor.requires_grad());
  return view;
}

at::Tensor linear(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& given_bias) {
  const auto bias = given_bias.value_or(at::Tensor());
  if (!is_fused(input, weight, bias)) {
    return at::native::linear(input, weight, given_bias);
  }
  auto backward = c10::make_intrusive<torch::autograd::generated::LinearBackward0>();
  backward->set_next_edges(torch::autograd::collect_next_edges(input, weight, bias));
  if (weight.requires_grad()) {
    backward->input_ = torch::autograd::SavedVariable(input, /*is_output=*/false);
  }
  if (input.requires_grad()) {
    backward->weight_ = torch::autograd::SavedVariable(weight, /*is_output=*/false);
  }
  auto output = [&] { // what PyTorch's composite makes of contiguous operands
    at::AutoDispatchBelowADInplaceOrView guard;
    const auto rows = input.dim() == 2 ? input : view_of(input, input.view({-1, input.size(-1)}));
    const auto columns = view_of(weight, weight.t());
    const auto product = bias.defined() ? at::addmm(bias, rows, columns) : at::mm(rows, columns);
    if (input.dim() == 2) {
      return product;
    }
    auto sizes = input.sizes().vec();
    sizes.back() = weight.size(0);
    return product.view(sizes);
  }();
  torch::autograd::set_history(output, backward);
  return output;
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
  const auto has_gradient = [](const at::Tensor& each) {
    return each.defined() && each.requires_grad();
  };
  const bool is_differentiated =
      at::GradMode::is_enabled() && (has_gradient(input) || has_gradient(gradient) || has_gradient(weight));
  if (is_differentiated || is_watched() || !may_be_plain(input) || !is_plain(gradient) || !may_be_plain(weight)) {
    return composite(input, gradient, weight, wanted);
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  return at::linear_backward(input, gradient, weight, wanted);
}

} // namespace
} // namespace tpu

namespace {
TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) {
  m.impl("linear", &tpu::linear);
  m.impl("linear_backward", &tpu::linear_backward);
}
} // namespace
