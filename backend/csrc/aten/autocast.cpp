// Autocast for PrivateUse1: PyTorch's own op lists, under the "tpu" name.
#include "aten/autocast.h"

#include <ATen/Operators.h>
#include <ATen/autocast_mode.h>
#include <c10/core/GradMode.h>
#include <torch/library.h>

#include "device/device.h"

namespace tpu {
namespace {

thread_local int kernel_depth = 0;
thread_local bool callers_grad_mode = true;

class KernelScope {
 public:
  KernelScope() {
    if (kernel_depth++ == 0) {
      callers_grad_mode = c10::GradMode::is_enabled();
    }
  }
  ~KernelScope() { --kernel_depth; }
  KernelScope(const KernelScope&) = delete;
  KernelScope& operator=(const KernelScope&) = delete;
};

// Stands in for the library in PyTorch's macros, and registers their kernels inside a scope.
struct ScopedKernels {
  torch::Library& library;

  template <class Name, class Result, class... Args>
  void impl(Name name, Result (*kernel)(Args...)) {
    library.impl(name, [kernel](Args... args) -> Result {
      const KernelScope scope;
      return kernel(std::forward<Args>(args)...);
    });
  }
};

} // namespace

bool in_autocast() {
  return kernel_depth > 0 || at::autocast::is_autocast_enabled(kDeviceType);
}

bool caller_wants_gradients() {
  return c10::GradMode::is_enabled() && (kernel_depth == 0 || callers_grad_mode);
}

} // namespace tpu

namespace at::autocast {
namespace {

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, library) {
  tpu::ScopedKernels m{library};
#define TPU_LOWER_PRECISION(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define TPU_FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define TPU_FP32_SET_OPT_DTYPE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define TPU_PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_LOWER_PRECISION_FP(TPU_LOWER_PRECISION)
  AT_FORALL_FP32(TPU_FP32)
  AT_FORALL_FP32_SET_OPT_DTYPE(TPU_FP32_SET_OPT_DTYPE)
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE)
  AT_FORALL_PROMOTE(TPU_PROMOTE)
}

} // namespace
} // namespace at::autocast
