// Asks PyTorch's own shape inference what an operator returns: its kernels for meta tensors.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <optional>
#include <vector>

namespace tpu {

// A tensor that was returned, of a list also which element.
struct MetaTensor {
  at::Tensor tensor;
  int slot;
  int element; // -1 outside a list
};

// What the operator returns for these arguments, lists flattened.  nullopt where there is no meta kernel; raises what
// it says of the arguments.
std::optional<std::vector<MetaTensor>> call_meta(const c10::OperatorHandle& handle, torch::jit::Stack stack);

} // namespace tpu
