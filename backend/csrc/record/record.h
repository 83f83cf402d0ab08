// The kernel behind every lowered overload: turns a call into one entry of the stream.
#pragma once

#include "record/op.h"

#include <ATen/core/boxing/KernelFunction.h>

namespace tpu {

class RecordKernel final : public c10::OperatorKernel {
 public:
  explicit RecordKernel(const OpInfo* op) : op_(op) {}
  void operator()(const c10::OperatorHandle& handle, c10::DispatchKeySet keys, torch::jit::Stack* stack);

 private:
  const OpInfo* op_;
};

// Overloads that have no lowering run on the CPU: correct, warned about once, counted.
void cpu_fallback(const c10::OperatorHandle& handle, torch::jit::Stack* stack);
// The same with the CPU's kernel for another layout than strided.
void run_on_cpu(const c10::OperatorHandle& handle, torch::jit::Stack* stack, c10::DispatchKey kernel);

} // namespace tpu
