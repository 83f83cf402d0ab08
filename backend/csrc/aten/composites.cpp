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
  const auto real = [](const at::Scalar& number) {
    return number.isComplex() ? at::Scalar(number.toDouble()) : number;
  };
  at::meta::arange_out(shape, real(start), real(end), real(step)); // checks the numbers
  TORCH_CHECK_NOT_IMPLEMENTED(
      !out.is_complex() && out.scalar_type() != at::kBool,
      "\"arange_cpu\" not implemented for '",
      c10::toString(out.scalar_type()),
      "'");
  if (out.numel() != shape.numel()) { // else it keeps its shape
    at::native::resize_output(out, shape.sizes());
  }
  const bool is_integral = c10::isIntegralType(out.scalar_type(), /*includeBool=*/true);
  const auto compute = is_integral ? c10::kLong : at::toOpMathType(out.scalar_type());
  const auto cast = [&](const at::Scalar& number) {
    return is_integral ? at::Scalar(number.toLong()) : real(number);
  };
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

// ---- lists of tensors with their scalars in one tensor on the CPU: the overload that takes a list of numbers

void run_with_numbers(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto scalars = torch::jit::pop(*stack).toTensor();
  const auto num_tensors = static_cast<int64_t>(torch::jit::peek(*stack, 0, 3).toListRef().size());
  torch::jit::push(*stack, at::native::convert_tensor_to_scalar_list(scalars, num_tensors));
  c10::Dispatcher::singleton().findSchemaOrThrow(op.operator_name().name.c_str(), "ScalarList").callBoxed(stack);
}

} // namespace
} // namespace tpu

namespace {
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("arange.start_out", &tpu::arange_out);
  for (const auto* name :
       {"_foreach_addcdiv.Tensor", "_foreach_addcmul.Tensor", "_foreach_addcdiv_.Tensor", "_foreach_addcmul_.Tensor"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&tpu::run_with_numbers>());
  }
  m.impl("native_batch_norm", &tpu::native_batch_norm);
  m.impl("_native_batch_norm_legit", &tpu::native_batch_norm_legit);
}
} // namespace
