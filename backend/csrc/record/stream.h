// The op stream of one device: entries are appended to a segment, a cut hands the segment to XLA.
#pragma once

#include "launch/launcher.h"
#include "launch/program.h"
#include "record/signature.h"
#include "record/sink.h"
#include "record/stream_lock.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <deque>
#include <functional>
#include <optional>

namespace tpu {

// A segment that nothing cuts (inference that is never read) is cut here, so that memory and compile time stay bounded.
constexpr size_t kMaxEntries = 16384;

// A mode is only a rule for when the stream is cut.
enum class Mode : uint8_t {
  Debug,  // after each op, and wait for it
  Strict, // after each op
  Fused,  // at a natural boundary: a host read, a flush, the op after an optimizer step
};

struct Counters {
  uint64_t ops_recorded{0};
  uint64_t segments_run{0};
  uint64_t segments_in_parts{0}; // run as a chain
  uint64_t compilations{0};
  uint64_t memory_hits{0};
  uint64_t disk_hits{0};
  double compile_seconds{0};
  uint64_t host_reads{0};
  uint64_t replays{0}; // of captured steps
};

// The entries recorded last, for a report on a process that hangs: read by any thread without the lock, which the
// thread that hangs may hold.  An entry that is being overwritten may appear as its successor.
class RecentEntries {
 public:
  // With the stream's lock held.
  void add(const Signature& signature) {
    const auto number = recorded_.load(std::memory_order_relaxed);
    ring_[number % kKept].store(&signature, std::memory_order_relaxed);
    recorded_.store(number + 1, std::memory_order_release);
  }
  uint64_t num_recorded() const { return recorded_.load(std::memory_order_relaxed); }
  void launched(uint64_t num_recorded) { // a turn inside another one may have come further
    launched_.store(std::max(num_recorded, launched_.load(std::memory_order_relaxed)), std::memory_order_relaxed);
  }

  // Oldest first; and how many of them, the last, were not handed to XLA, or to the thread that does so, when this was
  // asked.
  std::pair<std::vector<const Signature*>, size_t> last() const;

 private:
  static constexpr size_t kKept = 32;
  std::array<std::atomic<const Signature*>, kKept> ring_{};
  std::atomic<uint64_t> recorded_{0};
  std::atomic<uint64_t> launched_{0};
};

class Stream {
 public:
  explicit Stream(c10::DeviceIndex device) : device_(device) {}

  c10::DeviceIndex device() const { return device_; }
  StreamMutex& mutex() { return mutex_; }

  // All of these want the lock held, and those that cut may give it away meanwhile: others record, and what they have
  // recorded may be pending afterwards. Whether two of these are one buffer: `_foreach_add_([x[0], x[1]], 1)`.  An
  // entry writes a buffer once.
  bool is_written_twice(c10::ArrayRef<Buffer*> outputs);
  // `place` is where a checked entry was recorded.
  void
  append(const Signature& signature, const EncodedCall& call, c10::ArrayRef<Buffer*> outputs, UserPlace place = {});
  // Strict and debug: the entry is a segment of its own.
  void cut_after(const Signature& signature, c10::ArrayRef<Buffer*> outputs);
  // Hands what was recorded before this is called to the sink.  `next`: the sink of what is recorded after that. Raises
  // c10::Error, and what was to be computed carries the error; error_already_set for an interrupt, and nothing is lost.
  void cut(std::shared_ptr<Sink> next = nullptr);
  // Until nothing is pending, and nobody's turn.
  void cut_all();
  // The value that the buffer has, computed if need be; null if it was never written.
  ValuePtr concrete(Buffer* buffer);
  // An event: what was recorded so far.  A timed one ends the segment, so that there is a launch whose end is its time.
  std::shared_ptr<Position> mark(bool is_timed);
  // Runs what an event stands for, if that is still pending; returns how many launches that are.
  size_t dispatch(const Position& position);
  // Forgets all programs: they are of another runtime of XLA than what is launched from now on.  Raises where something
  // else is recorded into: a captured step, a region, a rehearsal.
  void forget_programs();
  // Gives each value that a buffer holds the array that `moved` makes of its own, a new reference.
  void move_values(const std::function<PyObject*(PyObject*)>& moved);
  void overwrite(Buffer* buffer, const Layout* layout, PyObject* owned_array);
  void assign(Buffer* buffer, ValuePtr value); // not by an entry
  void share(Buffer* from, Buffer* to);        // `to` gets the value of `from`, which has one
  void copy_resized(Buffer* from, Buffer* to); // the leading bytes both have; the rest is zero

  // Programs launched so far.
  size_t num_launched() const { return programs_.num_launched(); }
  // What tells that a launch, counted from 1, has ended; null if it is none of the last.
  std::shared_ptr<PyObject> token_of(size_t launch) const { return programs_.token_of(launch); }
  // Wait for the first so many of them, or ask whether they are computed.  With the GIL, not under the lock: it takes
  // long.
  void wait(size_t num_launched);
  // Raise for the first index of these launches that was out of range.  Waits for them, with the GIL, not under the
  // lock.
  void raise_range_errors(size_t num_launched) { range_checks_.raise_failed(num_launched); }
  bool done(size_t num_launched);

  // An optimizer has stepped: the segment ends where the next step begins.  Until then only what is made of this step's
  // results (metrics) still joins it; gradients that `zero_grad` drops in between need not be outputs.
  void end_step() { step_ended_ = sink_->ends_steps() && !segment_.entries.empty(); }

  // The host is about to read a tensor.
  void note_host_read();

  // What becomes of what is recorded.
  const std::shared_ptr<Sink>& sink() const { return sink_; }
  // Nothing may be pending.
  void set_sink(std::shared_ptr<Sink> sink) { sink_ = std::move(sink); }
  // The sink that launches it, and no more.
  const std::shared_ptr<Sink>& run_sink() const { return run_; }
  // What is pending is never handed over: what it was to compute carries this error.
  void drop_recorded(const std::string& message);

  // To be called before `launch_again` of a program of so many inputs.  Raises what `take_launches` does.
  void get_ready_to_launch(size_t num_inputs);
  // Hands over a program that was run before, for these entries; wants the GIL.  Where it is a large one it is queued,
  // for a thread: its outputs are in flight.  Returns whether it is; else `take_launches` tells what became of it.
  bool launch_again(std::unique_ptr<Launch> launch, const std::vector<const Signature*>& entries);
  // What was handed over and is launched is no longer in flight.  Raises what became of it, and what an earlier launch
  // found out of range.
  void take_launches();
  // Waits until nothing is in flight.  Raises what `take_launches` does.
  void settle();
  bool has_queued() const { return has_queued_; }
  // From here on no thread launches: the interpreter is about to end.
  void stop_launcher();

  Counters counters; // guarded by the lock
  RecentEntries recent;

 private:
  int32_t link(Buffer* buffer);
  int32_t number(const ValuePtr& value, bool is_input, std::optional<int32_t> origin);
  const Value& readable(Buffer* buffer);
  bool belongs_to_ended_step(const EncodedCall& call) const;
  bool is_full() const;
  // The segment that is recorded into; the next entry begins another one.
  Segment detach();
  // Whether a turn that another one waits for would need what that one computes.
  bool waits_for_outer_turn(const Segment& segment) const;
  void hand_over_next(Sink& sink);
  void keep_for_later(Segment segment, bool was_open);
  // What an event stands for was launched, or has failed.
  void reach(Position& position, bool waits);
  void drop(Segment& segment, const std::string& message);
  bool queues(size_t num_inputs) const;
  void add_range_checks(Segment& segment);

  c10::DeviceIndex device_;
  StreamMutex mutex_;
  Segment segment_;               // that is recorded into
  std::deque<Segment> sealed_;    // before it: to be run first, in order
  std::vector<Segment*> running_; // detached; the outermost turn's first
  Segment spare_;                 // its storage is used again
  ProgramCache programs_{mutex_, device_};
  RangeChecks range_checks_;
  Launcher launcher_;
  std::vector<std::unique_ptr<Launch>> launches_; // not by the launcher, and not looked at yet
  bool has_queued_{false};                        // since nothing was in flight
  size_t num_waited_{0};                          // launches that were waited for; guarded by the GIL
  size_t num_untaken_{0};                         // launches of captured steps that are not counted yet
  bool has_launcher_{true};

  uint64_t next_serial_{1};
  uint64_t last_mark_{0};
  bool step_ended_{false};
  const std::shared_ptr<Sink> run_{std::make_shared<RunSink>()};
  std::shared_ptr<Sink> sink_{run_};
};

Mode mode();
void set_mode(Mode mode);
inline bool cuts_after_each_op() {
  return mode() == Mode::Debug || mode() == Mode::Strict;
}
// Whether segments are run in parts, in fused mode.
Parts parts();
void set_parts(Parts parts);
// Whether segments without gradients whose sizes grow may share padded programs; see tpu_backend/padded.
bool pads_sizes();
void set_pads_sizes(bool pads_sizes);
// Whether this segment may: without gradients, in a mode that joins operations, and where the same bits are not
// promised.
bool may_be_padded(const Segment& segment);
// Whether all of it was recorded without gradients while sizes were padded.
bool is_without_gradients(const Segment& segment);

// Whether this process was forked from one in which the device was running.  JAX's threads are not in it, so a launch
// would hang; every use of a stream raises instead.
bool forked();
void check_not_forked();
void watch_forks(); // from here on

} // namespace tpu
