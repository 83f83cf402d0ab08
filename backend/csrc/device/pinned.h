// Host memory that `tensor.pin_memory()` makes.
#pragma once

#include <c10/core/Allocator.h>

namespace tpu {

// The runtime copies host memory itself and offers nothing to pin, so this is ordinary memory that is known to be asked
// for: `is_pinned()` tells the truth about what a program requested, and DataLoader(pin_memory=True) works.
c10::Allocator* pinned_allocator();
bool is_pinned(const void* data);

} // namespace tpu
