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

// The permutation that brings the dims of a dense tensor into memory order: permuted by it the tensor is contiguous.
// Dense means that the elements fill a range without gaps or overlap, in some order of the dims: contiguous,
// channels_last, a transposed matrix.  Dims of size 1 stay where they are, so a contiguous tensor always gives the
// identity.  What it is where `dense` is false means nothing.
struct MemoryOrder {
  bool dense{false};
  std::vector<int64_t> permutation;
};
MemoryOrder memory_order(c10::IntArrayRef sizes, c10::IntArrayRef strides);
// The layout of a dense tensor's value.
const Layout* dense_layout(const MemoryOrder& order, c10::IntArrayRef sizes, c10::ScalarType dtype);

// Whether a view is a box of slices of a base of the same dtype, at this offset.  The answer is part of a signature:
// offsets with the same one share a program.  Where it is true the lowering must find the digits, see `_digits` in
// tpu_backend/views.py; a test holds the two together.
//
// Dims.  Take the view's (size, stride) pairs without those of size 1 or stride 0, sorted by stride, largest first;
// join neighbours while outer.stride == inner.size * inner.stride.
//
// Digits.  Base dim j has stride S[j], the product of the base dims behind it, and limit L = S[j] * base_dims[j].  From
// the last base dim to the first, take the dims left with stride < L, smallest stride first:
//
// (a) the stride must be a multiple of S[j];
// (b) where (size - 1) * stride >= L, let c = L / stride; stride must divide L, c must divide size; the dim becomes
//     two, (c, stride), taken here, and (size / c, L), left for the next base dim.
//
// The dims taken, (s1, t1), (s2, t2), ... with rising strides, make base dim j into digits (stride, size, step):
// (S[j], s1, t1 / S[j]), then (t2, s2, 1), (t3, s3, 1), ...; none: (S[j], 1, 1).
//
// (c) a digit's radix is the next digit's stride (for the last one L) over its own stride; it must be a whole number
//     and exceed (size - 1) * step.
//
// If (a) fails, join base dims j and j + 1 into one and begin the digits again.  If (b) or (c) fails, join j - 1 and j
// and begin again; for j = 0 the answer is false.
//
// Fit.  True if offset / stride % radix + (size - 1) * step < radix for every digit.  A view without elements gives
// true.
bool is_box(c10::IntArrayRef base_dims, c10::IntArrayRef sizes, c10::IntArrayRef strides, int64_t offset);

} // namespace tpu
