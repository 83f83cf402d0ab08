// Operations on lists of tensors (`_foreach_*`, fused optimizers): what they do to one element depends on that element of
// each list alone, so one of them is as good as several on parts of the lists.
#pragma once

#include "signature.h"

namespace tpu {

// One value among a signature's words: an argument, or an element of one that is a list.
struct Leaf {
  size_t begin, end; // its words
  size_t arg;
  int32_t element; // -1 outside a list
  bool is_tensor{false};
  bool has_dims{false}; // of a tensor: it is more than a number
  bool reads{false};
  bool has_offset{false};
  bool is_integer{false}; // a runtime number
  bool is_real{false}; // a runtime number
};

struct ListCall {
  size_t length{0}; // of its lists; 0: it is no operation on lists, or cannot be taken apart
  std::vector<Leaf> leaves;
};

ListCall list_call(const Signature& signature);

// The same operation on elements [first, last) of its lists.
const Signature* part_of_lists(const Signature& signature, const ListCall& call, size_t first, size_t last);

} // namespace tpu
