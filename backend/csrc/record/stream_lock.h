// Who may use a device's stream, and whose turn it is to run what was recorded there.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <mutex>
#include <thread>

namespace tpu {

// The lock of a stream: recursive, and may be given away whole.  Order of locks: the stream before the GIL; nobody
// waits for the stream while holding the GIL.
//
// Who runs a segment has a turn, from where the segment is detached until it was launched.  In a turn the lock is given
// away while a program is compiled: that takes long, and may run any Python.  Others record meanwhile; who wants to run
// something, or a value of that segment, waits until the turn has ended.
class StreamMutex {
 public:
  void lock();
  bool try_lock();
  void unlock();

  // All of these want the lock held.
  bool is_idle() const { // nobody has a turn
    return num_turns_ == 0;
  }
  // Gives away the lock, and the GIL.  Raises error_already_set for an interrupt.
  void wait_until_idle();
  // Whether this thread waits for no turn to end: whoever has it may be waiting for this thread.  So it is for threads
  // that compile, and for finalizers that the collector runs in a turn or where the lock is held.  These may have turns
  // of their own inside the other one.
  bool must_not_wait() const;
  // Whether the turn that this thread has is none of those.
  bool is_outermost_turn() const;

 private:
  friend class StreamTurn;
  friend class StreamUnlocked;

  std::mutex mutex_;
  std::condition_variable idle_;
  std::atomic<std::thread::id> owner_{};
  size_t depth_{0}; // how often its owner holds it
  size_t num_turns_{0};
};

class StreamLock {
 public:
  explicit StreamLock(StreamMutex& mutex);
  ~StreamLock() { mutex_.unlock(); }
  StreamLock(const StreamLock&) = delete;
  StreamLock& operator=(const StreamLock&) = delete;

 private:
  StreamMutex& mutex_;
};

// Wants the lock held, and is destroyed with the lock held.
class StreamTurn {
 public:
  explicit StreamTurn(StreamMutex& mutex);
  ~StreamTurn();
  StreamTurn(const StreamTurn&) = delete;
  StreamTurn& operator=(const StreamTurn&) = delete;

 private:
  StreamMutex& mutex_;
};

// Gives the lock away for a time: where this thread holds it once.  A finalizer inside somebody's critical section
// keeps it.
class StreamUnlocked {
 public:
  explicit StreamUnlocked(StreamMutex& mutex);
  ~StreamUnlocked() noexcept(false); // a daemon thread ends here when the interpreter does
  StreamUnlocked(const StreamUnlocked&) = delete;
  StreamUnlocked& operator=(const StreamUnlocked&) = delete;

 private:
  StreamMutex& mutex_;
  const bool is_unlocked_;
};

// This thread compiles for others, from here on.
void mark_compile_thread();

} // namespace tpu
