#pragma once

namespace tpu {

// Whether torch.autocast is on for the device in this thread: also inside an operator that autocast itself calls, with
// its casts, while which PyTorch switches it off.
bool in_autocast();

// Whether the caller records gradients. It is not asked of the mode alone: when autocast keeps a weight's cast, PyTorch
// records the cast's gradient even if the caller has switched gradients off.
bool caller_wants_gradients();

} // namespace tpu
