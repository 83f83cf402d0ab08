// What the capture of a step wants to know of the one segment that the step is recorded in.
#pragma once

#include "record/sink.h"

#include <thread>

namespace tpu {

// The segment as it was run, without its values: these would keep their arrays.  Its numbers are those of its program.
struct SegmentRun : Segment {         // where it has no specialization, nothing of it was wanted, so nothing was run
  std::vector<const Layout*> layouts; // by local
};

// Launches each segment as one program, and keeps a record of it for replay.
class CaptureSink final : public Sink {
 public:
  void on_read(const Segment& segment, int32_t local, const Buffer& buffer) override;
  void on_entry(const Segment& segment, const Signature& signature, const EncodedCall& call) override;
  void on_write(Buffer& buffer, const Value& value, bool by_entry) override;
  void on_host_read() override;
  void on_full() override { is_full = true; }
  void on_other_launch() override;
  bool ends_steps() const override {
    return false; // a captured step is one program, with what is behind its optimizers
  }
  bool moves_views() const override { return true; } // those of its arguments
  std::optional<std::string> why_no_replay() const override;
  std::exception_ptr take(ProgramCache& programs, Segment& segment, Counters& counters) override;

  size_t num_cuts{0};
  bool is_full{false};                              // one of them since a segment takes no more entries
  UserPlace first_cut;                              // where the first of them came from
  std::optional<UserPlace> first_read;              // of a tensor by the host
  std::vector<std::pair<int32_t, uintptr_t>> reads; // an input's local number, the buffer that it was read from
  std::vector<uint32_t> readers; // by input of the segment: the signature of the entry that reads it first
  std::vector<uint32_t> float_takers, double_takers, integer_takers; // by number: the signature of the entry it is for
  std::vector<uintptr_t> written; // buffers that this thread gave a value by other means than an entry
  std::optional<SegmentRun> run;  // the last one

 private:
  bool is_of_this_thread() const { return thread_ == std::this_thread::get_id(); }

  const std::thread::id thread_{std::this_thread::get_id()};
};

} // namespace tpu
