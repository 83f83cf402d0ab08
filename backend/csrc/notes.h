// What the capture of a step wants to know of the one segment that the step is recorded in.
#pragma once

#include "program.h"

#include <optional>
#include <thread>

namespace tpu {

// The segment as it was run: what is left of it when its values are gone.
struct SegmentRun {
  std::shared_ptr<Variant> variant; // null: nothing of it was wanted, so nothing was run
  uint64_t serial{0};
  std::vector<const Signature*> entries;
  std::vector<int32_t> inputs;        // by position: the local number
  std::vector<const Layout*> layouts; // by local
  std::vector<uint8_t> is_input;      // by local
  std::vector<int64_t> offsets;
  RuntimeNumbers numbers; // with the offsets that are inputs
  std::vector<Draw> draws;
  std::vector<CheckedEntry> checked;
};

// Filled in by the stream, with its lock held.
struct Notes {
  const std::thread::id thread{std::this_thread::get_id()};
  size_t num_cuts{0};
  bool is_full{false}; // one of them since a segment takes no more entries
  UserPlace first_cut;                 // where the first of them came from
  std::optional<UserPlace> first_read; // of a tensor by the host
  std::vector<std::pair<int32_t, uintptr_t>> reads; // an input's local number, the buffer that it was read from
  std::vector<uint32_t> readers; // by input of the segment: the signature of the entry that reads it first
  std::vector<uint32_t> float_takers, double_takers, integer_takers; // by number: the signature of the entry it is for
  std::vector<uintptr_t> written; // buffers that this thread gave a value by other means than an entry
  std::optional<SegmentRun> run;  // the last one
};

} // namespace tpu
