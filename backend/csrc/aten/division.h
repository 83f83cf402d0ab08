// Division of integers by a number that is known on the host.
#pragma once

#include "record/op.h"

namespace tpu {

// Raises where such a divisor is 0, as PyTorch's CPU does.  Null for operators that divide no integers.
ArgumentCheck division_check(const c10::OperatorName& op);

} // namespace tpu
