// Kernels of PyTorch that are made of other operators alone: what they serve on the CPU they serve here too.
#pragma once

#include "device/device.h"

#include <torch/library.h>

#include <initializer_list>
#include <sstream>
#include <string>

namespace tpu {

template <c10::DispatchKey kernel>
void run_shared(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Device::get().ensure_initialized();
  op.callBoxedForDispatchKey(kernel, *stack);
}

// Registers run_shared for each name, with each suffix.
template <c10::DispatchKey kernel>
void share(torch::Library& m, const char* names, std::initializer_list<const char*> suffixes = {""}) {
  std::istringstream words(names);
  for (std::string name; words >> name;) {
    for (const char* suffix : suffixes) {
      m.impl((name + suffix).c_str(), torch::CppFunction::makeFromBoxedFunction<&run_shared<kernel>>());
    }
  }
}

} // namespace tpu
