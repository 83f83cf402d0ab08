// Indices that were out of range: what programs found of them, and the Python lines that recorded the ops.
#pragma once

#include <Python.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

namespace tpu {

// An instruction of the user's program: the innermost one that is neither ours nor PyTorch's.
struct UserPlace {
  std::shared_ptr<PyObject> code; // null where no Python runs (a thread of C++'s)
  int lasti{0};                   // offset in it, in bytes
};
UserPlace user_place();

// An entry whose lowering has bounds checks.
struct CheckedEntry {
  uint32_t entry; // its number in the segment
  uint32_t signature;
  UserPlace place;
};

// What a launch found out of range, to be looked at when it is done.
struct RangeCheck {
  size_t launch;
  std::shared_ptr<PyObject> token; // of JAX: can be waited for
  std::shared_ptr<PyObject> out_of_range;
  std::shared_ptr<PyObject> bounds_checks;
  std::vector<CheckedEntry> entries;
};

// What was found by programs that nobody has waited for yet.  Guarded by the GIL.
class RangeChecks {
 public:
  void add(RangeCheck check) { checks_.push_back(std::move(check)); }
  // Raises what old programs have found when many are kept, so that they stay few.
  void raise_old();
  // Waits for the first so many launches and raises for the first index of theirs that was out of range.
  void raise_failed(size_t num_launched);

 private:
  void raise_front();

  std::deque<RangeCheck> checks_;
};

} // namespace tpu
