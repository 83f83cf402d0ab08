// Kernels that say the shape, dtype and strides of a result, for operators where PyTorch's own is written in Python.
#pragma once

#include <ATen/core/boxing/KernelFunction.h>
#include <ATen/core/dispatch/Dispatcher.h>

namespace tpu {

// nullptr for an operator that is not in the table: PyTorch's dispatcher has its kernel.
const c10::KernelFunction* meta_kernel(const c10::OperatorName& name);

} // namespace tpu
