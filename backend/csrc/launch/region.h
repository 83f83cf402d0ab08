// The sink of torch.tpu.spmd: a region of the program whose results are declared.
#pragma once

#include "record/sink.h"

#include <map>

namespace tpu {

class Stream;

// Launches each segment for the results that are declared: those that it is given at the end, and what buffers hold
// that are older than the region.  Who else holds what changes no program, so that processes which run the same region
// launch the same programs.
class Region final : public Sink {
 public:
  // From here on a stream's segments are a region's.  Returns whether they are: not inside another sink.
  static bool begin(Stream& stream);
  // Launches what is recorded.  Its results are those given; with `and_held` also what living buffers hold; where none
  // are given, as an exception has ended the region, the latter alone.  Returns the executables of its launches.
  static std::vector<std::shared_ptr<PyObject>>
  end(Stream& stream, const std::optional<std::vector<at::Tensor>>& results, bool and_held);

  void before_read(const Segment& segment, Buffer& buffer) override;
  void on_read(const Segment& segment, int32_t local, const Buffer& buffer) override;
  void before_share(const Segment& segment, Buffer& buffer) override;
  void on_write(Buffer& buffer, const Value& value, bool by_entry) override;
  bool ends_steps() const override {
    return false; // an optimizer's step is in the middle of it
  }
  bool joins_collectives() const override { return true; }
  std::optional<std::string> why_no_replay() const override {
    return "it is called in a region of torch.tpu.spmd, which records it";
  }
  std::exception_ptr take(ProgramCache& programs, Segment& segment, Counters& counters) override;

 private:
  // What a segment computes for buffers.
  struct Computed {
    std::vector<int32_t>
        num_holders; // by local: buffers that were given it and nothing since, and later segments that read it
    std::unordered_map<uintptr_t, int32_t>
        of_older; // by address of a buffer that is older than the region: what it was given
    std::unordered_map<int32_t, uintptr_t> readers; // by local of an input: the buffer that it was read from first
  };
  struct Undeclared {
    ValuePtr value;
    uint32_t maker; // signature of the entry that made it
  };

  bool was_before(const Buffer& buffer) const { return buffer.address < first_new_address_; }
  // Whether the region has given this older buffer a value that no other older buffer had before.
  bool has_own_value(const Buffer& buffer) const;
  void give_own_value(Buffer& buffer);
  // Null where no segment of this region computes it.
  Computed* computing(const Value& value);
  void name_undeclared(StreamMutex& mutex);
  Results results_of(const Segment& segment) const;
  void find_undeclared(const Segment& segment);

  const uintptr_t first_new_address_{next_address()};
  std::map<uint64_t, Computed> computed_;                  // by serial of segments that are still to be launched
  std::optional<std::vector<ValuePtr>> results_;           // once they are declared
  std::vector<Undeclared> undeclared_;                     // values that somebody holds
  std::unordered_map<uintptr_t, const Value*> own_values_; // by address of an older buffer
  std::vector<std::shared_ptr<PyObject>> executables_;
  bool was_cut_{false}; // what follows a host read may depend on the rank's data
};

} // namespace tpu
