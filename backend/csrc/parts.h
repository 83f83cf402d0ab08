// A long segment in parts, for layered steps: cut where its entries repeat themselves (the layers of a model, forward and
// backward), and where lists of tensors do (an optimizer's, a layer's tensors each time), so that equal parts share a program.
#pragma once

#include "lists.h"
#include "program.h"

namespace tpu {

// Of an entry: all of it, or of one on lists the elements [first, last).
struct Piece {
  size_t entry;
  const Signature* signature;
  std::shared_ptr<const ListCall> lists; // null: all of it
  size_t first, last;
  bool is_of_turn{false}; // of a segment that is cut at its turns

  bool takes(int32_t element) const {
    return !lists || element < 0 || (static_cast<size_t>(element) >= first && static_cast<size_t>(element) < last);
  }
};

// Of an entry's circumstances: it was recorded in no_grad or inference mode, and not by a backward pass.
constexpr uint64_t kWithoutGradients = uint64_t{1} << 62;
bool is_without_gradients(const Segment& segment);

// Which pieces each part has, in order.  One part where there is nothing to share, and then only there.  A segment without
// gradients is cut first at the turns of a loop that differ in sizes alone: padded, they share programs.
PartPlan plan_parts(const Segment& whole);

// Whether a segment was cut at such turns.
bool grows(const PartPlan& plan);

// The parts as segments of their own.  They take over the values of `whole`: those that a later part reads live until it was run.
std::vector<Segment> take_apart(Segment& whole, const PartPlan& plan);

} // namespace tpu
