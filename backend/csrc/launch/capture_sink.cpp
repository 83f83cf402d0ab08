#include "launch/capture_sink.h"

namespace tpu {

void CaptureSink::on_read(const Segment& segment, int32_t local, const Buffer& buffer) {
  if (segment.is_input[local] != 0) {
    reads.emplace_back(local, buffer.address);
  }
}

void CaptureSink::on_entry(const Segment& segment, const Signature& signature, const EncodedCall&) {
  readers.resize(segment.inputs.size(), signature.id);
  float_takers.resize(segment.numbers.floats.size(), signature.id);
  double_takers.resize(segment.numbers.doubles.size(), signature.id);
  integer_takers.resize(segment.numbers.integers.size(), signature.id);
}

void CaptureSink::on_write(Buffer& buffer, const Value&, bool by_entry) {
  if (!by_entry && is_of_this_thread()) {
    written.push_back(buffer.address);
  }
}

void CaptureSink::on_host_read() {
  if (!first_read.has_value()) {
    first_read = user_place();
  }
}

void CaptureSink::on_other_launch() {
  if (num_cuts++ == 0) {
    first_cut = user_place();
  }
}

std::optional<std::string> CaptureSink::why_no_replay() const {
  return is_of_this_thread() ? std::optional<std::string>("another one is being recorded") : std::nullopt;
}

std::exception_ptr CaptureSink::take(ProgramCache& programs, Segment& segment, Counters& counters) {
  auto interrupt = programs.run(segment, held_results(segment), /*may_be_parts=*/false, counters);
  on_other_launch();
  run = SegmentRun{segment, {}};
  if (segment.specialization != nullptr) {
    run->numbers = segment.specialization->links.front().numbers_of(segment);
  }
  for (const auto& value : segment.values) {
    run->layouts.push_back(value->layout);
  }
  run->values.clear();
  run->unchecked.clear();
  run->position = nullptr;
  return interrupt;
}

} // namespace tpu
