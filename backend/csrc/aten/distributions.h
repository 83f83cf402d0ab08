// The bounds of random distributions, which PyTorch checks in the kernels that ours replace.
#pragma once

#include "record/op.h"

namespace tpu {

// For aten::uniform_ and its kin; null for any other op.  The numbers are inputs of the program, so that only here,
// while it is recorded, anybody can see them.
ArgumentCheck distribution_check(const c10::OperatorName& op);

} // namespace tpu
