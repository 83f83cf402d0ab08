#include "division.h"

#include <ATen/ATen.h>

namespace tpu {
namespace {

bool is_zero(const c10::IValue& divisor) {
  if (divisor.isScalar()) {
    return divisor.toScalar().isIntegral(/*includeBool=*/true) && divisor.toScalar().equal(0);
  }
  const auto& tensor = divisor.toTensor();
  return tensor.is_cpu() && tensor.dim() == 0 && at::isIntegralType(tensor.scalar_type(), /*includeBool=*/true) &&
      tensor.item().equal(0);
}

void check_divisor(c10::ArrayRef<c10::IValue> args) {
  if (args[0].isTensor()) { // else a number is divided by a tensor
    const auto& dividend = args[0].toTensor();
    TORCH_CHECK(
        !(at::isIntegralType(dividend.scalar_type(), /*includeBool=*/true) && dividend.numel() > 0 && is_zero(args[1])),
        "ZeroDivisionError");
  }
}

void check_rounding_divisor(c10::ArrayRef<c10::IValue> args) {
  if (!args[2].isNone()) {
    check_divisor(args);
  }
}

} // namespace

ArgumentCheck division_check(const c10::OperatorName& op) {
  const std::string name = op.name.substr(0, op.name.find_last_not_of('_') + 1); // in place or not
  if (name == "aten::floor_divide" || name == "aten::fmod" || name == "aten::remainder") {
    return &check_divisor;
  }
  const bool rounds = name == "aten::div" && op.overload_name.find("_mode") != std::string::npos;
  return rounds ? &check_rounding_divisor : nullptr;
}

} // namespace tpu
