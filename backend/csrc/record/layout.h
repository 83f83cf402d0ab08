// The N-dimensional shape and dtype in which a buffer's value is kept, in memory order (C-contiguous).
#pragma once

#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <vector>

namespace tpu {

struct Layout {
  uint32_t id;
  c10::ScalarType dtype;
  std::vector<int64_t> dims;
  int64_t numel;

  size_t nbytes() const { return static_cast<size_t>(numel) * c10::elementSize(dtype); }
};

// Layouts are interned and live as long as the process: equal layouts have equal addresses and ids.
const Layout* intern_layout(c10::IntArrayRef dims, c10::ScalarType dtype);
const Layout* layout_by_id(uint32_t id);

// The permutation that brings the dims of a dense tensor into memory order.  The rule is stated in
// tpu_backend/views.py, memory_order(); the two must agree, and a test holds them together.  What it is where `dense`
// is false means nothing.
struct MemoryOrder {
  bool dense{false};
  std::vector<int64_t> permutation;
};
MemoryOrder memory_order(c10::IntArrayRef sizes, c10::IntArrayRef strides);
// Of a dense tensor's value.
const Layout* dense_layout(const MemoryOrder& order, c10::IntArrayRef sizes, c10::ScalarType dtype);

// Whether a view is a box of slices of a base of the same dtype, at this offset.  The algorithm is stated in
// tpu_backend/views.py, slices(); the two must agree, and a test holds them together.
bool is_box(c10::IntArrayRef base_dims, c10::IntArrayRef sizes, c10::IntArrayRef strides, int64_t offset);

} // namespace tpu
