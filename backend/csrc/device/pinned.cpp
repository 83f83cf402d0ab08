#include "device/pinned.h"

#include <c10/core/CPUAllocator.h>

#include <map>
#include <mutex>

namespace tpu {
namespace {

// The blocks handed out: where each begins and ends.
struct Blocks {
  std::mutex mutex;
  std::map<const char*, const char*> end_of;
};
Blocks& blocks() {
  static auto* instance = new Blocks; // never destroyed: tensors outlive static destruction
  return *instance;
}

void free_block(void* data) {
  {
    std::lock_guard<std::mutex> guard(blocks().mutex);
    blocks().end_of.erase(static_cast<const char*>(data));
  }
  c10::GetDefaultCPUAllocator()->raw_deallocate(data);
}

class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t nbytes) override {
    if (nbytes == 0) {
      return {nullptr, c10::Device(c10::DeviceType::CPU)};
    }
    auto* data = static_cast<char*>(c10::GetDefaultCPUAllocator()->raw_allocate(nbytes));
    std::lock_guard<std::mutex> guard(blocks().mutex);
    blocks().end_of[data] = data + nbytes;
    return {data, data, &free_block, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* target, const void* source, size_t count) const override {
    default_copy_data(target, source, count);
  }
};

} // namespace

c10::Allocator* pinned_allocator() {
  static auto* instance = new PinnedAllocator;
  return instance;
}

bool is_pinned(const void* data) {
  const auto* place = static_cast<const char*>(data);
  std::lock_guard<std::mutex> guard(blocks().mutex);
  auto after = blocks().end_of.upper_bound(place);
  return after != blocks().end_of.begin() && place < std::prev(after)->second;
}

} // namespace tpu
