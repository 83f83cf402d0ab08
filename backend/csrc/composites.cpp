// Kernels made of other recorded operators, where PyTorch has one for each device that it knows but no composite.

#include "device.h"

#include <ATen/ATen.h>
#include <ATen/MetaFunctions.h>
#include <ATen/OpMathType.h>
#include <ATen/native/ForeachUtils.h>
#include <ATen/native/Resize.h>
#include <torch/library.h>

#include <algorithm>

namespace tpu {
namespace {

void assign(at::Tensor& out, const at::Tensor& value) {
  at::native::resize_output(out, value.sizes());
  out.copy_(value);
}

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

// ---- determinants and solutions by LU

// The derivatives of det and slogdet expect the factors of the transpose where A is contiguous and real, as LAPACK's
// column-major order would have it (linalg_det_backward and slogdet_backward in torch's FunctionsManual.cpp).
void factor_for_det(const at::Tensor& A, at::Tensor& LU, at::Tensor& pivots) {
  auto info = at::empty({0}, A.options().dtype(at::kInt));
  at::linalg_lu_factor_ex_out(LU, pivots, info, A.is_contiguous() && !A.is_complex() ? A.mT() : A);
}

// 1 or -1: the sign of the permutation that the pivots (from 1) make.
at::Tensor permutation_sign(const at::Tensor& pivots) {
  const auto unmoved = at::arange(1, pivots.size(-1) + 1, pivots.options());
  return pivots.ne(unmoved).sum(-1, /*keepdim=*/false, at::kLong).remainder(2).mul(-2).add(1);
}

std::tuple<at::Tensor&, at::Tensor&, at::Tensor&> det(
    const at::Tensor& A, at::Tensor& result, at::Tensor& LU, at::Tensor& pivots) {
  factor_for_det(A, LU, pivots);
  assign(result, LU.diagonal(0, -2, -1).prod(-1) * permutation_sign(pivots));
  return {result, LU, pivots};
}

std::tuple<at::Tensor&, at::Tensor&, at::Tensor&, at::Tensor&> slogdet(
    const at::Tensor& A, at::Tensor& sign, at::Tensor& logabsdet, at::Tensor& LU, at::Tensor& pivots) {
  factor_for_det(A, LU, pivots);
  const auto diagonal = LU.diagonal(0, -2, -1);
  assign(sign, diagonal.sgn().prod(-1) * permutation_sign(pivots));
  assign(logabsdet, diagonal.abs().log().sum(-1));
  return {sign, logabsdet, LU, pivots};
}

std::tuple<at::Tensor&, at::Tensor&, at::Tensor&, at::Tensor&> solve_ex(
    const at::Tensor& A,
    const at::Tensor& B,
    bool left,
    bool check_errors,
    at::Tensor& result,
    at::Tensor& LU,
    at::Tensor& pivots,
    at::Tensor& info) {
  at::linalg_lu_factor_ex_out(LU, pivots, info, A);
  // B is one vector for each matrix where it has all dims of A but the last (linalg_solve_is_vector_rhs)
  const bool is_vector = B.dim() == 1 || (A.dim() - 1 == B.dim() && B.sizes() == A.sizes().slice(0, A.dim() - 1));
  const auto solution = at::linalg_lu_solve(LU, pivots, is_vector ? B.unsqueeze(-1) : B, left);
  assign(result, is_vector ? solution.squeeze(-1) : solution);
  if (check_errors) {
    at::_linalg_check_errors(info, "torch.linalg.solve_ex", A.dim() == 2);
  }
  return {result, LU, pivots, info};
}

// ---- CTC loss. Lengths that come as lists become tensors, so that no length is part of a program, and the targets one
// row a sample.

at::Tensor on_device(at::IntArrayRef values, const at::Tensor& like) {
  return at::tensor(values, at::kLong).to(like.device());
}

at::Tensor padded_targets(const at::Tensor& targets, at::IntArrayRef lengths) {
  if (targets.dim() == 2) {
    return targets;
  }
  const auto batch = static_cast<int64_t>(lengths.size());
  const int64_t longest = batch == 0 ? 0 : *std::max_element(lengths.begin(), lengths.end());
  std::vector<int64_t> starts;
  int64_t total = 0;
  for (int64_t length : lengths) {
    starts.push_back(total);
    total += length;
  }
  TORCH_CHECK(
      targets.numel() == total, "Expected targets of ", total, " elements, the sum of target_lengths, got ", targets.numel());
  if (total == 0) {
    return targets.new_zeros({batch, longest});
  }
  const auto places = at::arange(longest, targets.options().dtype(at::kLong)) + on_device(starts, targets).unsqueeze(1);
  return targets.index_select(0, places.clamp_max(total - 1).flatten()).view({batch, longest});
}

void check_ctc_lengths(
    const at::Tensor& log_probs, const at::Tensor& targets, at::IntArrayRef input_lengths, at::IntArrayRef target_lengths) {
  const auto steps = log_probs.size(0), batch = log_probs.size(1);
  TORCH_CHECK(static_cast<int64_t>(input_lengths.size()) == batch, "input_lengths must be of size batch_size");
  TORCH_CHECK(static_cast<int64_t>(target_lengths.size()) == batch, "target_lengths must be of size batch_size");
  for (int64_t b = 0; b < batch; ++b) {
    TORCH_CHECK(
        input_lengths[b] >= 0 && input_lengths[b] <= steps,
        "Expected input_lengths to have value from 0 to ",
        steps,
        ", but got value ",
        input_lengths[b],
        " (while checking arguments for ctc_loss)");
    TORCH_CHECK(
        target_lengths[b] >= 0 && (targets.dim() == 1 || target_lengths[b] <= targets.size(1)),
        "Expected target_lengths to have value from 0 to the width of targets, but got value ",
        target_lengths[b],
        " (while checking arguments for ctc_loss)");
  }
}

std::tuple<at::Tensor, at::Tensor> ctc_loss(
    const at::Tensor& log_probs,
    const at::Tensor& targets,
    at::IntArrayRef input_lengths,
    at::IntArrayRef target_lengths,
    int64_t blank,
    bool zero_infinity) {
  check_ctc_lengths(log_probs, targets, input_lengths, target_lengths);
  auto [loss, log_alpha] = at::_ctc_loss(
      log_probs,
      padded_targets(targets, target_lengths),
      on_device(input_lengths, log_probs),
      on_device(target_lengths, log_probs),
      blank,
      zero_infinity);
  const int64_t longest =
      target_lengths.empty() ? 0 : *std::max_element(target_lengths.begin(), target_lengths.end());
  return {loss, log_alpha.narrow(2, 0, 2 * longest + 1)};
}

at::Tensor ctc_loss_backward(
    const at::Tensor& grad,
    const at::Tensor& log_probs,
    const at::Tensor& targets,
    at::IntArrayRef input_lengths,
    at::IntArrayRef target_lengths,
    const at::Tensor& neg_log_likelihood,
    const at::Tensor& log_alpha,
    int64_t blank,
    bool zero_infinity) {
  const auto padded = padded_targets(targets, target_lengths);
  return at::_ctc_loss_backward(
      grad,
      log_probs,
      padded,
      on_device(input_lengths, log_probs),
      on_device(target_lengths, log_probs),
      neg_log_likelihood,
      at::constant_pad_nd(log_alpha, {0, 2 * padded.size(1) + 1 - log_alpha.size(2)}),
      blank,
      zero_infinity);
}

// ---- small ones

// PyTorch's marks a tensor that it knows to be zero, to skip arithmetic on it; XLA sees that for itself.
at::Tensor efficient_zero_tensor(
    at::IntArrayRef size,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout> layout,
    std::optional<at::Device> device,
    std::optional<bool> pin_memory) {
  return at::zeros(size, dtype, layout, device, pin_memory);
}

at::Tensor& narrow_copy_out(
    const at::Tensor& self, int64_t dim, int64_t start, int64_t length, at::Tensor& out) {
  assign(out, self.narrow(dim, start, length));
  return out;
}

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

std::tuple<at::Tensor&, at::Tensor&, at::Tensor&> native_batch_norm_out(
    const at::Tensor& input,
    const std::optional<at::Tensor>& weight,
    const std::optional<at::Tensor>& bias,
    const std::optional<at::Tensor>& running_mean,
    const std::optional<at::Tensor>& running_var,
    bool training,
    double momentum,
    double eps,
    at::Tensor& out,
    at::Tensor& save_mean,
    at::Tensor& save_invstd) {
  const auto [output, mean, invstd] =
      tpu::native_batch_norm(input, weight, bias, running_mean, running_var, training, momentum, eps);
  assign(out, output);
  assign(save_mean, mean);
  assign(save_invstd, invstd);
  return {out, save_mean, save_invstd};
}

std::tuple<at::Tensor&, at::Tensor&, at::Tensor&> native_batch_norm_legit_out(
    const at::Tensor& input,
    const std::optional<at::Tensor>& weight,
    const std::optional<at::Tensor>& bias,
    at::Tensor& running_mean,
    at::Tensor& running_var,
    bool training,
    double momentum,
    double eps,
    at::Tensor& out,
    at::Tensor& save_mean,
    at::Tensor& save_invstd) {
  return native_batch_norm_out(
      input, weight, bias, running_mean, running_var, training, momentum, eps, out, save_mean, save_invstd);
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
  m.impl("_linalg_det.result", &tpu::det);
  m.impl("_linalg_slogdet.sign", &tpu::slogdet);
  m.impl("_linalg_solve_ex.result", &tpu::solve_ex);
  m.impl("_ctc_loss", &tpu::ctc_loss);
  m.impl("_ctc_loss_backward", &tpu::ctc_loss_backward);
  m.impl("_efficientzerotensor", &tpu::efficient_zero_tensor);
  m.impl("narrow_copy.out", &tpu::narrow_copy_out);
  m.impl("_foreach_addcdiv.Tensor", &tpu::foreach_addcdiv);
  m.impl("_foreach_addcmul.Tensor", &tpu::foreach_addcmul);
  m.impl("_foreach_addcdiv_.Tensor", &tpu::foreach_addcdiv_);
  m.impl("_foreach_addcmul_.Tensor", &tpu::foreach_addcmul_);
  m.impl("native_batch_norm", &tpu::native_batch_norm);
  m.impl("_native_batch_norm_legit", &tpu::native_batch_norm_legit);
  m.impl("native_batch_norm.out", &tpu::native_batch_norm_out);
  m.impl("_native_batch_norm_legit.out", &tpu::native_batch_norm_legit_out);
}
} // namespace
