// `import torch` puts kernels written in Python over PyTorch's compiled meta kernels.  The first call of one imports
// torch._dynamo (more than a second), and each takes a tenth of a millisecond.  The compiled ones, which are also what
// the CPU's and CUDA's kernels begin with, can still be called by their C++ names; the table below does so for the
// operators of common models.  Those of its operators that PyTorch has only in Python are written out here.
#include "record/meta_kernels.h"

#include <ATen/ATen.h>
#include <ATen/ExpandUtils.h>
#include <ATen/MetaFunctions.h>
#include <ATen/Operators.h>
#include <ATen/TensorIterator.h>
#include <ATen/native/TypeProperties.h>
#include <ATen/native/layer_norm.h>

#include <unordered_map>

namespace tpu {
namespace {

using at::Scalar;
using at::Tensor;

Tensor wrapped(const Scalar& number) {
  Tensor tensor = at::scalar_tensor(number, at::TensorOptions().dtype(number.type()));
  tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
  return tensor;
}

// `at::empty_like`, whose meta kernel is in Python as well.
Tensor like(const Tensor& self, at::ScalarType dtype) {
  const auto strides = self.is_non_overlapping_and_dense() ? self.strides().vec()
                                                           : at::infer_dense_strides(self.sizes(), self.strides());
  return at::empty_strided(self.sizes(), strides, self.options().dtype(dtype));
}

Tensor mul_number(const Tensor& self, const Scalar& other) {
  return at::meta::mul(self, wrapped(other));
}

Tensor fill(const Tensor& self, const Scalar& /*value*/) {
  return like(self, self.scalar_type());
}

Tensor draw(const Tensor& self, double, double, std::optional<at::Generator>) {
  return like(self, self.scalar_type());
}

Tensor zero(const Tensor& self) {
  return like(self, self.scalar_type());
}

Tensor& arange_out(const Scalar& end, Tensor& out) {
  return at::meta::arange_outf(Scalar(0), end, Scalar(1), out);
}

Tensor abs(const Tensor& self) {
  return like(self, at::toRealValueType(self.scalar_type()));
}

Tensor isnan(const Tensor& self) {
  return like(self, at::kBool);
}

Tensor mean(const Tensor& self, std::optional<at::ScalarType> dtype) {
  return at::meta::mean(self, at::OptionalIntArrayRef(), /*keepdim=*/false, dtype);
}

Tensor rsub(const Tensor& self, const Tensor& other, const Scalar& alpha) {
  return at::meta::sub(other, self, alpha);
}

Tensor rsub_number(const Tensor& self, const Scalar& other, const Scalar& alpha) {
  return at::meta::sub(wrapped(other), self, alpha);
}

Tensor floor_divide(const Tensor& self, const Tensor& other) {
  return at::meta::div(self, other, "floor");
}

Tensor relu(const Tensor& self) {
  TORCH_CHECK(self.scalar_type() != at::kBool, "Boolean inputs not supported for relu");
  return at::meta::clamp_min(self, Scalar(0));
}

Tensor logical_not(const Tensor& self) {
  return at::meta::eq(self, Scalar(0));
}

Tensor masked_fill(const Tensor& self, const Tensor& mask, const Scalar& /*value*/) {
  TORCH_CHECK(mask.scalar_type() == at::kBool, "masked_fill: expected a mask of bool, got ", mask.scalar_type());
  return at::empty(at::infer_size(self.sizes(), mask.sizes()), self.options());
}

Tensor where(const Tensor& condition, const Tensor& self, const Tensor& other) {
  TORCH_CHECK(
      condition.scalar_type() == at::kBool || condition.scalar_type() == at::kByte,
      "where: expected a condition of bool, got ",
      condition.scalar_type());
  const Tensor result =
      at::empty({0}, condition.options().dtype(at::native::result_type(self, other)).device(at::kMeta));
  at::TensorIteratorConfig()
      .check_all_same_dtype(false)
      .add_output(result)
      .add_const_input(condition)
      .add_const_input(self)
      .add_const_input(other)
      .build();
  return result;
}

Tensor safe_softmax(const Tensor& self, int64_t dim, std::optional<at::ScalarType> dtype) {
  return at::meta::_softmax(dtype.has_value() ? self.to(*dtype) : self, dim, /*half_to_float=*/false);
}

Tensor embedding(
    const Tensor& weight,
    const Tensor& indices,
    c10::SymInt /*padding_idx*/,
    bool /*scale_grad_by_freq*/,
    bool /*sparse*/) {
  TORCH_CHECK(weight.dim() == 2, "'weight' must be 2-D");
  TORCH_CHECK(
      indices.scalar_type() == at::kLong || indices.scalar_type() == at::kInt,
      "embedding: expected indices of int64 or int32, got ",
      indices.scalar_type());
  auto sizes = indices.sizes().vec();
  sizes.push_back(weight.size(1));
  return at::empty(sizes, weight.options());
}

std::tuple<Tensor, Tensor, Tensor> native_layer_norm(
    const Tensor& input,
    c10::SymIntArrayRef normalized_shape,
    const std::optional<Tensor>& weight,
    const std::optional<Tensor>& bias,
    double /*eps*/) {
  TORCH_CHECK(at::isFloatingType(input.scalar_type()), "layer_norm: expected floats, got ", input.scalar_type());
  const auto shape = C10_AS_INTARRAYREF_SLOW(normalized_shape);
  at::native::_check_layer_norm_inputs(input, shape, weight.value_or(Tensor()), bias.value_or(Tensor()));
  auto sizes = input.sizes().vec();
  std::fill(sizes.end() - static_cast<int64_t>(shape.size()), sizes.end(), 1);
  // Of 16 bit beside weights of 32, the statistics are kept in 32; else in the dtype of all.
  const bool is_mixed = weight.has_value() && weight->defined() && weight->scalar_type() != input.scalar_type();
  const auto options = input.options().dtype(is_mixed ? weight->scalar_type() : input.scalar_type());
  return {at::empty(input.sizes(), input.options()), at::empty(sizes, options), at::empty(sizes, options)};
}

Tensor multinomial(const Tensor& self, c10::SymInt num_samples, bool /*replacement*/, std::optional<at::Generator>) {
  TORCH_CHECK(self.dim() == 1 || self.dim() == 2, "multinomial: expected 1 or 2 dimensions, got ", self.dim());
  auto sizes = self.sizes().vec();
  sizes.back() = num_samples.guard_int(__FILE__, __LINE__);
  return at::empty(sizes, self.options().dtype(at::kLong));
}

using Table = std::unordered_map<c10::OperatorName, c10::KernelFunction>;

// `kernel` has the schema's own type, which also picks the right one of several overloads.
template <class Op, typename Op::schema* kernel>
void add(Table& table) {
  table.emplace(
      c10::OperatorName(Op::name, Op::overload_name), c10::KernelFunction::makeFromUnboxedFunction(TORCH_FN(kernel)));
}

Table make_table() {
  Table table;
#define COMPILED(op, function) add<at::_ops::op, &at::meta::function>(table)
#define WRITTEN(op, function) add<at::_ops::op, &function>(table)
  COMPILED(_log_softmax, _log_softmax);
  COMPILED(_log_softmax_backward_data, _log_softmax_backward_data);
  COMPILED(_softmax, _softmax);
  COMPILED(_softmax_backward_data, _softmax_backward_data);
  COMPILED(add_Tensor, add);
  COMPILED(add__Tensor, add_);
  COMPILED(addcdiv, addcdiv);
  COMPILED(addcdiv_, addcdiv_);
  COMPILED(addcmul, addcmul);
  COMPILED(addcmul_, addcmul_);
  COMPILED(addmm, addmm);
  COMPILED(all, all);
  COMPILED(all_dim, all);
  COMPILED(amax, amax);
  COMPILED(amin, amin);
  COMPILED(any, any);
  COMPILED(any_dim, any);
  COMPILED(arange_start_out, arange_outf);
  COMPILED(argmax, argmax);
  COMPILED(argmin, argmin);
  COMPILED(baddbmm, baddbmm);
  COMPILED(bitwise_and_Tensor, bitwise_and);
  COMPILED(bitwise_not, bitwise_not);
  COMPILED(bitwise_or_Tensor, bitwise_or);
  COMPILED(bmm, bmm);
  COMPILED(cat, cat);
  COMPILED(clamp, clamp);
  COMPILED(cos, cos);
  COMPILED(cumsum, cumsum);
  COMPILED(div_Tensor, div);
  COMPILED(div__Tensor, div_);
  COMPILED(div_Tensor_mode, div);
  COMPILED(eq_Scalar, eq);
  COMPILED(eq_Tensor, eq);
  COMPILED(exp, exp);
  COMPILED(fill__Scalar, fill_);
  COMPILED(ge_Scalar, ge);
  COMPILED(ge_Tensor, ge);
  COMPILED(gelu, gelu);
  COMPILED(gelu_backward, gelu_backward);
  COMPILED(gt_Scalar, gt);
  COMPILED(gt_Tensor, gt);
  COMPILED(index_Tensor, index);
  COMPILED(le_Scalar, le);
  COMPILED(le_Tensor, le);
  COMPILED(linalg_vector_norm, linalg_vector_norm);
  COMPILED(log, log);
  COMPILED(lt_Scalar, lt);
  COMPILED(lt_Tensor, lt);
  COMPILED(max_dim, max);
  COMPILED(maximum, maximum);
  COMPILED(mean_dim, mean);
  COMPILED(minimum, minimum);
  COMPILED(mm, mm);
  COMPILED(mul_Tensor, mul);
  COMPILED(mul__Tensor, mul_);
  COMPILED(ne_Scalar, ne);
  COMPILED(ne_Tensor, ne);
  COMPILED(neg, neg);
  COMPILED(nll_loss_backward, nll_loss_backward_symint);
  COMPILED(nll_loss_forward, nll_loss_forward_symint);
  COMPILED(normal_, normal_);
  COMPILED(pow_Scalar, pow);
  COMPILED(pow_Tensor_Scalar, pow);
  COMPILED(pow_Tensor_Tensor, pow);
  COMPILED(reciprocal, reciprocal);
  COMPILED(rsqrt, rsqrt);
  COMPILED(scatter_src, scatter);
  COMPILED(scatter_value, scatter);
  COMPILED(sigmoid, sigmoid);
  COMPILED(sigmoid_backward, sigmoid_backward);
  COMPILED(silu, silu);
  COMPILED(silu_backward, silu_backward);
  COMPILED(sin, sin);
  COMPILED(sqrt, sqrt);
  COMPILED(sub_Tensor, sub);
  COMPILED(sub__Tensor, sub_);
  COMPILED(sum_dim_IntList, sum);
  COMPILED(tanh, tanh);
  COMPILED(tanh_backward, tanh_backward);
  COMPILED(threshold_backward, threshold_backward);
  COMPILED(topk, topk_symint);
  COMPILED(tril, tril_symint);
  COMPILED(triu, triu_symint);
  COMPILED(uniform_, uniform_);
  COMPILED(zero_, zero_);
  WRITTEN(_safe_softmax, safe_softmax);
  WRITTEN(abs, abs);
  WRITTEN(arange_out, arange_out);
  WRITTEN(embedding, embedding);
  WRITTEN(fill_Scalar, fill);
  WRITTEN(floor_divide, floor_divide);
  WRITTEN(isnan, isnan);
  WRITTEN(logical_not, logical_not);
  WRITTEN(masked_fill_Scalar, masked_fill);
  WRITTEN(mean, mean);
  WRITTEN(mul_Scalar, mul_number);
  WRITTEN(multinomial, multinomial);
  WRITTEN(native_layer_norm, native_layer_norm);
  WRITTEN(normal_functional, draw);
  WRITTEN(relu, relu);
  WRITTEN(rsub_Scalar, rsub_number);
  WRITTEN(rsub_Tensor, rsub);
  WRITTEN(uniform, draw);
  WRITTEN(where_self, where);
  WRITTEN(zero, zero);
#undef COMPILED
#undef WRITTEN
  return table;
}

} // namespace

const c10::KernelFunction* meta_kernel(const c10::OperatorName& name) {
  static const auto* const table = new Table(make_table());
  const auto found = table->find(name);
  return found == table->end() ? nullptr : &found->second;
}

} // namespace tpu
