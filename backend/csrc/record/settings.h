// PyTorch's global settings that the device reads when an operation is recorded.
#pragma once

#include <ATen/Context.h>

namespace tpu {

// Of float32 matrix products.  PyTorch's own getter raises where somebody has used `torch.backends.*.fp32_precision`,
// so this is made of those: the coarsest that the CPU's or CUDA's products may have, which is what
// `torch.set_float32_matmul_precision` and `allow_tf32` set as well.
at::Float32MatmulPrecision matmul_precision();

// Whether memory that nothing was written to is filled (torch.utils.deterministic.fill_uninitialized_memory).
bool fills_uninitialized();

} // namespace tpu
