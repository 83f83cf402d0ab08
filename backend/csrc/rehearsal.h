// What torch.tpu.rehearsal stands on: what is recorded meanwhile is compiled, not run, and taken back in the end.
#pragma once

#include "program.h"

namespace tpu {

class Rehearsal {
 public:
  // A buffer is about to be written.
  void keep(Buffer& buffer) {
    if (was_before(buffer)) {
      kept_.try_emplace(buffer.address, Kept{handle_of(buffer), buffer.value, buffer.layout});
    }
  }

  // Something is drawn from a generator, which stands there.
  void keep(const at::Generator& generator, uint64_t seed, uint64_t offset) {
    generators_.try_emplace(generator.unsafeGetGeneratorImpl(), Drawn{generator, seed, offset});
  }

  // Whether a buffer is older than the rehearsal.
  bool was_before(const Buffer& buffer) const {
    return buffer.address < first_new_address_;
  }

  void take_back() {
    for (auto& [address, kept] : kept_) {
      if (Buffer* buffer = kept.handle->buffer) {
        buffer->value = std::move(kept.value);
        buffer->layout = kept.layout;
      }
    }
    kept_.clear();
    for (auto& [key, drawn] : generators_) {
      drawn.generator.set_current_seed(drawn.seed);
      drawn.generator.set_offset(drawn.offset);
    }
    generators_.clear();
  }

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

  const uintptr_t first_new_address_{next_address()};
  std::unordered_map<uintptr_t, Kept> kept_; // by address
  std::unordered_map<const void*, Drawn> generators_;
};

} // namespace tpu
