#pragma once

namespace tpu {

// Lets this process end whatever its other threads wait for, within 5 s: they may be in a program that another
// rank has left. To be called at exit. The exit code is Python's own, or `at_least` where that is 0.
void leave(int at_least);

// This process ends with 1 where Python's own exit code is 0. To be called at exit.
void fail_at_exit();

} // namespace tpu
