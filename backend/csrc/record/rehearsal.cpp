#include "record/rehearsal.h"

#include "record/stream.h"

namespace tpu {
namespace {

constexpr const char* kRehearsed = "what is computed in torch.tpu.rehearsal has no value";

} // namespace

void Rehearsal::begin(Stream& stream) {
  const auto check_alone = [&] {
    TORCH_CHECK(stream.sink()->launches(), "torch.tpu.rehearsal inside another one");
    TORCH_CHECK(
        stream.sink() == stream.run_sink(),
        "torch.tpu.rehearsal while torch.tpu.capture records a step: rehearse outside of it");
  };
  check_alone();
  stream.cut_all();
  stream.settle();
  check_alone(); // another thread may have had the lock meanwhile
  stream.set_sink(std::make_shared<Rehearsal>());
}

void Rehearsal::end(Stream& stream) {
  std::exception_ptr interrupt; // what was rehearsed is taken back all the same
  try {
    if (!stream.mutex().must_not_wait()) {
      stream.mutex().wait_until_idle();
    }
  } catch (...) {
    interrupt = std::current_exception();
  }
  stream.drop_recorded(kRehearsed); // what an error has left there
  static_cast<Rehearsal&>(*stream.sink()).take_back();
  stream.set_sink(stream.run_sink());
  if (interrupt) {
    std::rethrow_exception(interrupt);
  }
}

void Rehearsal::on_entry(const Segment& segment, const Signature&, const EncodedCall& call) {
  if (call.generator.defined()) {
    const size_t place = segment.draws.back().place;
    const auto at = [&](size_t which) {
      return static_cast<uint64_t>(segment.numbers.integers[which]);
    };
    generators_.try_emplace(call.generator.unsafeGetGeneratorImpl(), Drawn{call.generator, at(place), at(place + 1)});
  }
}

void Rehearsal::on_write(Buffer& buffer, const Value&, bool) {
  if (was_before(buffer)) {
    kept_.try_emplace(buffer.address, Kept{handle_of(buffer), buffer.value, buffer.layout});
  }
}

std::exception_ptr Rehearsal::take(ProgramCache& programs, Segment& segment, Counters&) {
  programs.rehearse(segment);
  segment.fail(kRehearsed);
  return nullptr;
}

void Rehearsal::take_back() {
  for (auto& [address, kept] : kept_) {
    if (Buffer* buffer = kept.handle->buffer) {
      buffer->value = std::move(kept.value);
      buffer->layout = kept.layout;
    }
  }
  for (auto& [key, drawn] : generators_) {
    drawn.generator.set_current_seed(drawn.seed);
    drawn.generator.set_offset(drawn.offset);
  }
}

} // namespace tpu
