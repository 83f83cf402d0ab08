#pragma once

namespace tpu {

// To be called at exit, all of them. The exit code is Python's own; where that is 0, the largest that was asked for.

// Lets this process end whatever its other threads wait for, within 5 s: they may be in a program that another
// rank has left.
void leave(int at_least);

// Lets this process end while its other threads work in C++: at a compilation, which cannot be interrupted.
void leave_threads();

// The exit code is not 0.
void fail_at_exit();

} // namespace tpu
