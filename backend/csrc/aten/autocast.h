#pragma once

namespace tpu {

// Whether torch.autocast is on for the device in this thread: also inside an operator that autocast itself calls, with
// its casts, while which PyTorch switches it off.
bool in_autocast();

// Whether gradients are recorded in this thread. Inside an operator that autocast calls: outside of it, too. PyTorch
// records those of a cast that it keeps of a weight, even where the caller does not.
bool caller_wants_gradients();

} // namespace tpu
