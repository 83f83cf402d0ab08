// The device as PyTorch sees it: guard, hooks, generators, and the one object that owns the streams.
#pragma once

#include "record/stream.h"

#include <ATen/core/Generator.h>
#include <c10/core/GeneratorImpl.h>

#include <atomic>
#include <map>

namespace tpu {

constexpr c10::DeviceType kDeviceType = c10::DeviceType::PrivateUse1;

// Counter-based: a draw is a pure function of (seed, offset), and each random op takes one offset.
class GeneratorImpl final : public c10::GeneratorImpl {
 public:
  explicit GeneratorImpl(c10::DeviceIndex device);
  void set_current_seed(uint64_t seed) override;
  uint64_t current_seed() const override { return seed_; }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  uint64_t seed() override;
  void set_state(const c10::TensorImpl& state) override; // uint8[16]: seed, offset, little endian
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override;
  static c10::DeviceType device_type() { return kDeviceType; }
  // The first of so many offsets in a row.
  uint64_t take_offsets(int count) { return std::exchange(offset_, offset_ + count); }

 private:
  GeneratorImpl* clone_impl() const override;
  uint64_t seed_;
  uint64_t offset_{0};
};

// Everything mutable and global, in one place.
class Device {
 public:
  static Device& get();

  // Imports tpu_backend.runtime (and so JAX) on first use; raises what it raises.
  void ensure_initialized();
  bool initialized() const { return initialized_.load(std::memory_order_acquire) && !forked(); }
  void mark_initialized() {
    watch_forks();
    initialized_.store(true, std::memory_order_release);
  }

  Stream& stream(c10::DeviceIndex device);
  const at::Generator& default_generator(c10::DeviceIndex device);
  c10::DeviceIndex count() const { return count_; }
  c10::DeviceIndex current() const;
  // The device that an index names; -1 names the current one.  Scripts for GPUs name it by LOCAL_RANK, so that is a
  // name of the one device of a launcher's process.
  c10::DeviceIndex find(int index) const;
  // One of many processes without LOCAL_RANK, as after mp.spawn: the first number above 0 that it uses is its device's.
  void mark_as_one_of_many();
  void set_current(c10::DeviceIndex device);
  void synchronize(c10::DeviceIndex device);
  // Hands over what was recorded; returns how many programs have been launched.
  size_t dispatch(c10::DeviceIndex device);
  // An event: what was recorded so far.
  std::shared_ptr<Position> mark(c10::DeviceIndex device, bool is_timed);
  size_t dispatch(c10::DeviceIndex device, const Position& position);
  // Wait until so many programs are computed, or ask whether they are.
  void wait(c10::DeviceIndex device, size_t num_launched);
  bool done(c10::DeviceIndex device, size_t num_launched);

  // Overloads that ran on the CPU for want of a lowering.
  void count_fallback(const std::string& op);
  std::map<std::string, int64_t> fallbacks();
  void clear_fallbacks();

 private:
  static constexpr int kNotOneOfMany = -2;
  static constexpr int kNotNamed = -1;

  Device();
  bool is_own_number(int index) const;
  std::string other_name() const;

  std::atomic<bool> initialized_{false};
  c10::DeviceIndex count_;
  mutable std::atomic<int> own_number_{kNotOneOfMany};
  std::vector<std::unique_ptr<Stream>> streams_;
  std::vector<at::Generator> generators_;
  std::mutex fallback_mutex_;
  std::map<std::string, int64_t> fallbacks_;
};

void register_hooks();

} // namespace tpu
