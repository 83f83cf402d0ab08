// Launches programs from a thread of its own, so that the thread that trains need not wait for JAX to do so.
//
// JAX takes some six microseconds a buffer to launch a program, most of them without the GIL.  A replayed step has
// hundreds of buffers, and all that its caller wants to know at once is which values its tensors now have.  So the step
// is queued: its outputs are values in flight, and whoever wants to look at one waits for the queue first
// (Stream::settle).
#pragma once

#include "launch/program.h"

#include <condition_variable>
#include <deque>
#include <mutex>

namespace tpu {

// A program that is to be launched, and what became of it.
struct Launch {
  struct Input {
    ValuePtr value;
    bool is_donated;
    bool is_shared; // others than the buffer it was taken from hold it
  };
  std::shared_ptr<Specialization> specialization; // one program
  RuntimeNumbers numbers;
  std::vector<Input> inputs;     // dropped once it is launched
  std::vector<ValuePtr> outputs; // one an output of the executable
  std::vector<ValuePtr> spare;   // see Specialization
  std::vector<CheckedEntry> checked;
  bool is_queued{false};

  // What came out.
  std::shared_ptr<PyObject> token;        // null: it failed
  std::shared_ptr<PyObject> out_of_range; // null: it has no bounds checks
  std::shared_ptr<const std::string> error;
  bool is_followup{false}; // it failed since an earlier one did

  // With the GIL.  Raises error_already_set for an interrupt, else it keeps the error.
  void run();
};

// While containers are made on a launcher's thread: where they are, the collector runs, and with it finalizers of the
// user's.  These must not come to that thread, since whoever holds a stream's lock may be waiting for it.  Not while
// the GIL is given away for long: another thread may switch the collector off itself.
class WithoutCollector {
 public:
  WithoutCollector();
  ~WithoutCollector();
  WithoutCollector(const WithoutCollector&) = delete;
  WithoutCollector& operator=(const WithoutCollector&) = delete;

 private:
  const bool was_on_;
};

class Launcher {
 public:
  // Waits, without the GIL, while the queue is full.
  void add(std::unique_ptr<Launch> launch);
  // Those that were launched since this was asked last, in order.
  std::vector<std::unique_ptr<Launch>> take_done();
  // Waits, without the GIL, until there is nothing left to launch.
  void wait();
  // Whether the thread that asks is a launcher's: what it runs (the garbage collector, say) must wait for nobody.
  static bool is_this_thread();

 private:
  void work();
  template <class Condition>
  void wait_for(std::unique_lock<std::mutex>& lock, const Condition& condition);

  std::mutex mutex_;
  std::condition_variable wanted_;
  std::condition_variable finished_;
  std::deque<std::unique_ptr<Launch>> queue_;
  std::vector<std::unique_ptr<Launch>> done_;
  bool is_running_{false}; // a launch that is in neither
  bool has_thread_{false};
};

} // namespace tpu
