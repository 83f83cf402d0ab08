// Where a sequence repeats itself: there a long segment is cut, so that equal stretches share one program.
#pragma once

#include <c10/util/ArrayRef.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace tpu {

// `times` equal stretches of `length` each, one behind the other.
struct Repeat {
  size_t begin;
  size_t length;
  size_t times;

  size_t end() const {
    return begin + length * times;
  }
};

// The repeats in `words`, in order and apart from each other, found greedily: first the one that saves most words, then
// what is left on both sides of it.  None is shorter than `shortest`.  Where one may begin at several places, it begins at
// the one of least `cost` (an element a place).
std::vector<Repeat> find_repeats(c10::ArrayRef<uint64_t> words, c10::ArrayRef<uint64_t> cost, size_t shortest);

} // namespace tpu
