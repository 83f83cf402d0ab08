#include "record/settings.h"

namespace tpu {

at::Float32MatmulPrecision matmul_precision() {
  const auto& context = at::globalContext();
  const auto cpu = context.float32Precision(at::Float32Backend::MKLDNN, at::Float32Op::MATMUL);
  const auto cuda = context.float32Precision(at::Float32Backend::CUDA, at::Float32Op::MATMUL);
  const auto is_any = [&](at::Float32Precision precision) {
    return cpu == precision || cuda == precision;
  };
  if (is_any(at::Float32Precision::BF16)) {
    return at::Float32MatmulPrecision::MEDIUM;
  }
  return is_any(at::Float32Precision::TF32) ? at::Float32MatmulPrecision::HIGH : at::Float32MatmulPrecision::HIGHEST;
}

bool fills_uninitialized() {
  const auto& context = at::globalContext();
  return context.deterministicAlgorithms() && context.deterministicFillUninitializedMemory();
}

} // namespace tpu
