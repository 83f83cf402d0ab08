#include "distributed/leave.h"

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <exception>
#include <thread>

#include <unistd.h>

namespace tpu {
namespace {

constexpr auto kLongest = std::chrono::seconds(5);

// A thread that wakes while Python ends is unwound by it, and C++ aborts where that meets a frame which must not
// throw. It stays where it is instead.
void hold_other_threads() {
  while (gettid() != getpid()) {
    pause();
  }
}

void on_abort(int signal) {
  hold_other_threads();
  std::signal(signal, SIG_DFL);
}

void on_terminate() {
  hold_other_threads();
  std::abort();
}

int exit_code_at_least = 0;

void exit_at_once(int status, void*) {
  _exit(status != 0 ? status : exit_code_at_least);
}

// What C++ would destroy may be in use by other threads, or wait for them.
void end_at_once(int at_least) {
  exit_code_at_least = std::max(exit_code_at_least, at_least);
  on_exit(exit_at_once, nullptr);
}

} // namespace

void leave(int at_least) {
  leave_threads();
  end_at_once(at_least);
  std::thread([at_least] {
    std::this_thread::sleep_for(kLongest);
    _exit(at_least != 0 ? at_least : 1);
  }).detach();
}

void leave_threads() {
  std::signal(SIGABRT, on_abort);
  std::set_terminate(on_terminate);
  end_at_once(0);
}

void fail_at_exit() {
  end_at_once(1);
}

} // namespace tpu
