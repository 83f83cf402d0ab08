#include "distributed/leave.h"

#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <thread>

#include <unistd.h>

namespace tpu {
namespace {

constexpr auto kLongest = std::chrono::seconds(5);

// A thread that wakes while Python ends is unwound by it, and C++ aborts where that meets a frame which must not
// throw. It stays where it is instead.
void hold_other_threads(int signal) {
  if (gettid() != getpid()) {
    for (;;) {
      pause();
    }
  }
  std::signal(signal, SIG_DFL);
}

void exit_at_once(int status, void* at_least) {
  _exit(status != 0 ? status : static_cast<int>(reinterpret_cast<intptr_t>(at_least)));
}

void end_at_once(int at_least) {
  on_exit(exit_at_once, reinterpret_cast<void*>(static_cast<intptr_t>(at_least)));
}

} // namespace

void leave(int at_least) {
  std::signal(SIGABRT, hold_other_threads);
  end_at_once(at_least); // what C++ would destroy waits
  std::thread([at_least] {
    std::this_thread::sleep_for(kLongest);
    _exit(at_least != 0 ? at_least : 1);
  }).detach();
}

void fail_at_exit() {
  end_at_once(1);
}

} // namespace tpu
