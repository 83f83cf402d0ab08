#pragma once

namespace tpu {

// Whether torch.autocast is on for the device in this thread: also inside an operator that autocast itself calls, with
// its casts, while which PyTorch switches it off.
bool in_autocast();

} // namespace tpu
