// What torch.tpu.rehearsal stands on: what is recorded meanwhile is compiled, not run, and taken back in the end.
#pragma once

#include "program.h"

namespace tpu {

class Rehearsal {
 public:
  // A buffer is about to be written.
  void keep(Buffer& buffer) {
    if (buffer.address < first_new_address_) {
      kept_.try_emplace(buffer.address, Kept{handle_of(buffer), buffer.value, buffer.layout});
    }
  }

  // Whose values would have been replaced, had this been no rehearsal.
  Holders holders() const {
    Holders holders;
    for (const auto& [address, kept] : kept_) {
      ++holders[kept.value.get()];
    }
    return holders;
  }

  void take_back() {
    for (auto& [address, kept] : kept_) {
      if (Buffer* buffer = kept.handle->buffer) {
        buffer->value = std::move(kept.value);
        buffer->layout = kept.layout;
      }
    }
    kept_.clear();
  }

 private:
  struct Kept {
    std::shared_ptr<BufferHandle> handle;
    ValuePtr value;
    const Layout* layout;
  };

  const uintptr_t first_new_address_{next_address()};
  std::unordered_map<uintptr_t, Kept> kept_; // by address
};

} // namespace tpu
