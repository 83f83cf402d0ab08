#include "record/stream_lock.h"

#include "launch/launcher.h"
#include "record/stream.h"

#include <pybind11/pybind11.h>

#include <chrono>
#include <exception>
#include <utility>

namespace tpu {
namespace {

constexpr auto kBetweenSignals = std::chrono::milliseconds(100);

thread_local size_t t_turns = 0;
thread_local bool t_compiles = false;

bool holds_gil() {
  return Py_IsInitialized() && PyGILState_Check();
}

// The GIL is given away before the stream is waited for.
void lock_without_gil(StreamMutex& mutex) {
  if (mutex.try_lock()) {
    return;
  }
  if (!holds_gil()) {
    mutex.lock();
    return;
  }
  PyThreadState* state = PyEval_SaveThread();
  mutex.lock();
  PyEval_RestoreThread(state);
}

// Runs the handlers of signals that have come, in Python's main thread; returns what they raised.  Wants the GIL not
// held: the caller gave it away, or PyTorch did (`x.cpu()`).
std::exception_ptr pending_interrupt() {
  if (!Py_IsInitialized() || PyGILState_GetThisThreadState() == nullptr) {
    return nullptr;
  }
  pybind11::gil_scoped_acquire gil;
  return PyErr_CheckSignals() == 0 ? nullptr : std::make_exception_ptr(pybind11::error_already_set());
}

} // namespace

void StreamMutex::lock() {
  if (owner_.load(std::memory_order_relaxed) != std::this_thread::get_id()) {
    mutex_.lock();
    owner_.store(std::this_thread::get_id(), std::memory_order_relaxed);
  }
  ++depth_;
}

bool StreamMutex::try_lock() {
  if (owner_.load(std::memory_order_relaxed) != std::this_thread::get_id()) {
    if (!mutex_.try_lock()) {
      return false;
    }
    owner_.store(std::this_thread::get_id(), std::memory_order_relaxed);
  }
  ++depth_;
  return true;
}

void StreamMutex::unlock() {
  if (--depth_ == 0) {
    owner_.store({}, std::memory_order_relaxed);
    mutex_.unlock();
  }
}

void StreamMutex::wait_until_idle() {
  const size_t depth = depth_;
  std::exception_ptr interrupt;
  while (!is_idle() && !interrupt) {
    PyThreadState* state = holds_gil() ? PyEval_SaveThread() : nullptr;
    depth_ = 0;
    owner_.store({}, std::memory_order_relaxed);
    std::unique_lock guard(mutex_, std::adopt_lock);
    idle_.wait_for(guard, kBetweenSignals, [&] { return is_idle(); });
    if (!is_idle()) { // Ctrl-C is noticed here, and its handler holds no lock
      guard.unlock();
      interrupt = pending_interrupt();
      guard.lock();
    }
    guard.release();
    owner_.store(std::this_thread::get_id(), std::memory_order_relaxed);
    depth_ = depth;
    if (state != nullptr) {
      PyEval_RestoreThread(state);
    }
  }
  if (interrupt) {
    std::rethrow_exception(interrupt);
  }
}

bool StreamMutex::must_not_wait() const {
  return t_compiles || t_turns > 0 || depth_ > 1;
}

bool StreamMutex::is_outermost_turn() const {
  return !t_compiles && t_turns == 1 && depth_ == 1;
}

StreamLock::StreamLock(StreamMutex& mutex) : mutex_(mutex) {
  check_not_forked();
  // A finalizer that the garbage collector runs there: who holds the lock may be waiting for that thread.
  TORCH_CHECK(
      !Launcher::is_this_thread(),
      "the tpu device cannot be used by what Python runs on the thread that launches programs (a finalizer)");
  lock_without_gil(mutex_);
}

StreamTurn::StreamTurn(StreamMutex& mutex) : mutex_(mutex) {
  ++mutex_.num_turns_;
  ++t_turns;
}

StreamTurn::~StreamTurn() {
  --t_turns;
  if (--mutex_.num_turns_ == 0) {
    mutex_.idle_.notify_all();
  }
}

StreamUnlocked::StreamUnlocked(StreamMutex& mutex) : mutex_(mutex), is_unlocked_(mutex.depth_ == 1) {
  if (is_unlocked_) {
    mutex_.unlock();
  }
}

StreamUnlocked::~StreamUnlocked() noexcept(false) {
  if (is_unlocked_) {
    lock_without_gil(mutex_);
  }
}

void mark_compile_thread() {
  t_compiles = true;
}

} // namespace tpu
