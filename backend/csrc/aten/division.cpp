#include "aten/division.h"

#include <ATen/ATen.h>

namespace tpu {
namespace {

// In the dtype of the dividend, to which a number wraps: 256 is no divisor of bytes.
bool is_zero(const at::Scalar& divisor, c10::ScalarType dividend) {
  if (!divisor.isIntegral(/*includeBool=*/true)) {
    return false;
  }
  const bool wraps = divisor.isIntegral(/*includeBool=*/false) && dividend != c10::kBool;
  const auto unused = wraps ? 64 - 8 * c10::elementSize(dividend) : 0;
  return static_cast<uint64_t>(divisor.toLong()) << unused == 0;
}

bool is_zero(const c10::IValue& divisor, c10::ScalarType dividend) {
  if (divisor.isScalar()) {
    return is_zero(divisor.toScalar(), dividend);
  }
  const auto& tensor = divisor.toTensor();
  return tensor.is_cpu() && tensor.dim() == 0 && is_zero(tensor.item(), dividend);
}

void check_divisor(c10::ArrayRef<c10::IValue> args) {
  if (args[0].isTensor()) { // else a number is divided by a tensor
    const auto& dividend = args[0].toTensor();
    TORCH_CHECK(
        !(at::isIntegralType(dividend.scalar_type(), /*includeBool=*/true) && dividend.numel() > 0 &&
          is_zero(args[1], dividend.scalar_type())),
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
