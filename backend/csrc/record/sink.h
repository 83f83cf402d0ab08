// What becomes of recorded entries: a stream hands each segment to its sink.
#pragma once

#include "launch/program.h"

#include <optional>
#include <string>

namespace tpu {

// A stream has one at a time.  All of it is called with the stream's lock held.
class Sink {
 public:
  virtual ~Sink() = default;

  // While entries are recorded: an entry is about to read what a buffer holds,
  virtual void before_read(const Segment&, Buffer&) {}
  // it reads this value of the open segment out of a buffer,
  virtual void on_read(const Segment&, int32_t /*local*/, const Buffer&) {}
  // an entry has joined the open segment, and its results have no values yet,
  virtual void on_entry(const Segment&, const Signature&, const EncodedCall&) {}
  // another buffer is about to share this one's value,
  virtual void before_share(const Segment&, Buffer&) {}
  // a buffer is about to get this value in place of its own, from an entry or by other means,
  virtual void on_write(Buffer&, const Value&, bool /*by_entry*/) {}
  // the host is about to read a tensor,
  virtual void on_host_read() {}
  // the open segment takes no more entries,
  virtual void on_full() {}
  // another program is launched in between,
  virtual void on_other_launch() {}
  // a step that torch.tpu.capture would record begins or ends.
  virtual void on_captured_step(bool /*begins*/) {}

  // Whether an optimizer's step ends the segment.
  virtual bool ends_steps() const { return true; }
  // Whether a buffer must keep its storage.
  virtual bool must_keep(const Buffer&) const { return false; }
  // Why no captured step can be replayed here; nothing where it can.
  virtual std::optional<std::string> why_no_replay() const { return std::nullopt; }
  // Whether collectives are entries of a segment like others; else each is a program of its own.
  virtual bool joins_collectives() const { return false; }
  // Whether what it takes may be launched again with views that start elsewhere.
  virtual bool moves_views() const { return false; }
  // Whether `take` launches what it is given.
  virtual bool launches() const { return true; }

  // Takes a segment that was cut.  Returns and raises what `ProgramCache::run` does, which most sinks call.
  virtual std::exception_ptr take(ProgramCache& programs, Segment& segment, Counters& counters) = 0;
};

// Launches each segment.
class RunSink final : public Sink {
 public:
  std::exception_ptr take(ProgramCache& programs, Segment& segment, Counters& counters) override {
    return programs.run(segment, held_results(segment), /*may_be_parts=*/true, counters);
  }
};

} // namespace tpu
