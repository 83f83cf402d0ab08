// The sink of torch.tpu.rehearsal: compiles, runs nothing, and restores the buffers at the end.
#pragma once

#include "record/sink.h"

namespace tpu {

class Stream;

// Has threads compile the program of each segment, and launches nothing.
class Rehearsal final : public Sink {
 public:
  // From here on a stream's segments go to a rehearsal; in the end its buffers are what they were.
  static void begin(Stream& stream);
  static void end(Stream& stream);

  void on_entry(const Segment& segment, const Signature& signature, const EncodedCall& call) override;
  void on_write(Buffer& buffer, const Value& value, bool by_entry) override;
  void on_captured_step(bool begins) override { is_in_captured_step_ = begins; }
  bool ends_steps() const override {
    return !is_in_captured_step_; // which is one program
  }
  bool must_keep(const Buffer& buffer) const override { return was_before(buffer); }
  std::optional<std::string> why_no_replay() const override {
    return "it is called in torch.tpu.rehearsal, which runs nothing";
  }
  bool launches() const override { return false; }
  std::exception_ptr take(ProgramCache& programs, Segment& segment, Counters& counters) override;

 private:
  struct Kept {
    std::shared_ptr<BufferHandle> handle;
    ValuePtr value;
    const Layout* layout;
  };
  struct Drawn {
    at::Generator generator;
    uint64_t seed;
    uint64_t offset;
  };

  // Whether a buffer is older than the rehearsal.
  bool was_before(const Buffer& buffer) const { return buffer.address < first_new_address_; }
  void take_back();

  bool is_in_captured_step_{false};
  const uintptr_t first_new_address_{next_address()};
  std::unordered_map<uintptr_t, Kept> kept_; // by address
  std::unordered_map<const void*, Drawn> generators_;
};

} // namespace tpu
