#pragma once

namespace tpu {

// The number by which a script for GPUs names the one device of its process.  A launcher says it in LOCAL_RANK.
// Without that variable it is the first number above 0 that a process of many names, as after mp.spawn.
void mark_as_one_of_many();

} // namespace tpu
