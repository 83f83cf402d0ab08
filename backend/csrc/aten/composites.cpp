// Kernels made of other recorded operators, where PyTorch has one for each device that it knows but no composite.

#include "device/device.h"

#include <ATen/ATen.h>
#include <ATen/MetaFunctions.h>
#include <ATen/OpMathType.h>
#include <ATen/native/ForeachUtils.h>
#include <ATen/native/Resize.h>
#include <torch/library.h>

namespace tpu {
namespace {

// ---- ranges. The length is part of the program; where it starts and the step are not (a decoder's positions start
// elsewhere at every token).

at::Tensor& arange_out(const at::Scalar& start, const at::Scalar& end, const at::Scalar& step, at::Tensor& out) {
  auto shape = at::empty({0}, out.options().device(c10::kMeta));
  // A complex number without imaginary part is the real one; toDouble refuses others.
  const auto real = [](const at::Scalar& number) { return number.isComplex() ? at::Scalar(number.toDouble()) : number; };
  at::meta::arange_out(shape, real(start), real(end), real(step)); // checks the numbers
  TORCH_CHECK_NOT_IMPLEMENTED(
      !out.is_complex() && out.scalar_type() != at::kBool, "\"arange_cpu\" not implemented for '", c10::toString(out.scalar_type()), "'");
  if (out.numel() != shape.numel()) { // else it keeps its shape
    at::native::resize_output(out, shape.sizes());
  }
  const bool is_integral = c10::isIntegralType(out.scalar_type(), /*includeBool=*/true);
  const auto compute = is_integral ? c10::kLong : at::toOpMathType(out.scalar_type());
  const auto cast = [&](const at::Scalar& number) { return is_integral ? at::Scalar(number.toLong()) : real(number); };
  auto range = at::empty({shape.numel()}, out.options().dtype(compute));
  at::arange_out(range, shape.numel());
  if (!cast(step).equal(1)) {
    range.mul_(cast(step));
  }
  if (!cast(start).equal(0)) {
    range.add_(cast(start));
  }
  return out.copy_(range.view(out.sizes()));
}

// ---- batch norm

// PyTorch's kernel updates the running statistics without its schema saying so; here they are written openly.
std::tuple<at::Tensor, at::Tensor, at::Tensor> native_batch_norm(
    const at::Tensor& input,
    const std::optional<at::Tensor>& weight,
    const std::optional<at::Tensor>& bias,
    const std::optional<at::Tensor>& running_mean,
    const std::optional<at::Tensor>& running_var,
    bool training,
    double momentum,
    double eps) {
  const bool tracks = running_mean.has_value() && running_mean->defined();
  if (!tracks) {
    return at::_native_batch_norm_legit(input, weight, bias, training, momentum, eps);
  }
  auto [output, save_mean, save_invstd, new_mean, new_var] = at::_native_batch_norm_legit_functional(
      input, weight, bias, *running_mean, *running_var, training, momentum, eps);
  if (training) {
    running_mean->copy_(new_mean);
    running_var->copy_(new_var);
    return {output, save_mean, save_invstd};
  }
  // What a backward pass in evaluation does not need is not kept.
  return {output, at::empty({0}, save_mean.options()), at::empty({0}, save_invstd.options())};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> native_batch_norm_legit(
    const at::Tensor& input,
    const std::optional<at::Tensor>& weight,
    const std::optional<at::Tensor>& bias,
    at::Tensor& running_mean,
    at::Tensor& running_var,
    bool training,
    double momentum,
    double eps) {
  return tpu::native_batch_norm(input, weight, bias, running_mean, running_var, training, momentum, eps);
}

// ---- lists of tensors with their scalars in one tensor, which is on the CPU

std::vector<at::Scalar> numbers_in(const at::Tensor& scalars, at::TensorList tensors) {
  return at::native::convert_tensor_to_scalar_list(scalars, static_cast<int64_t>(tensors.size()));
}

std::vector<at::Tensor>
foreach_addcdiv(at::TensorList self, at::TensorList tensor1, at::TensorList tensor2, const at::Tensor& scalars) {
  return at::_foreach_addcdiv(self, tensor1, tensor2, numbers_in(scalars, self));
}

std::vector<at::Tensor>
foreach_addcmul(at::TensorList self, at::TensorList tensor1, at::TensorList tensor2, const at::Tensor& scalars) {
  return at::_foreach_addcmul(self, tensor1, tensor2, numbers_in(scalars, self));
}

void foreach_addcdiv_(
    at::TensorList self, at::TensorList tensor1, at::TensorList tensor2, const at::Tensor& scalars) {
  at::_foreach_addcdiv_(self, tensor1, tensor2, numbers_in(scalars, self));
}

void foreach_addcmul_(
    at::TensorList self, at::TensorList tensor1, at::TensorList tensor2, const at::Tensor& scalars) {
  at::_foreach_addcmul_(self, tensor1, tensor2, numbers_in(scalars, self));
}

} // namespace
} // namespace tpu

namespace {
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("arange.start_out", &tpu::arange_out);
  m.impl("_foreach_addcdiv.Tensor", &tpu::foreach_addcdiv);
  m.impl("_foreach_addcmul.Tensor", &tpu::foreach_addcmul);
  m.impl("_foreach_addcdiv_.Tensor", &tpu::foreach_addcdiv_);
  m.impl("_foreach_addcmul_.Tensor", &tpu::foreach_addcmul_);
  m.impl("native_batch_norm", &tpu::native_batch_norm);
  m.impl("_native_batch_norm_legit", &tpu::native_batch_norm_legit);
}
} // namespace
