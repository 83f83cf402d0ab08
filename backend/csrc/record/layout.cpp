#include "record/layout.h"

#include <c10/util/SmallVector.h>

#include <algorithm>
#include <deque>
#include <mutex>
#include <numeric>
#include <unordered_map>

namespace tpu {
namespace {

struct Interner {
  std::mutex mutex;
  std::deque<Layout> layouts;
  std::unordered_multimap<uint64_t, const Layout*> by_hash;
};

Interner& interner() {
  static auto* instance = new Interner; // never destroyed: values outlive static destruction
  return *instance;
}

uint64_t hash_of(c10::IntArrayRef dims, c10::ScalarType dtype) {
  uint64_t hash = static_cast<uint64_t>(dtype) + 0x9e3779b97f4a7c15ULL;
  for (int64_t dim : dims) {
    hash = (hash ^ static_cast<uint64_t>(dim)) * 0xff51afd7ed558ccdULL;
    hash ^= hash >> 32;
  }
  return hash;
}

} // namespace

const Layout* intern_layout(c10::IntArrayRef dims, c10::ScalarType dtype) {
  auto& table = interner();
  const uint64_t hash = hash_of(dims, dtype);
  std::lock_guard<std::mutex> guard(table.mutex);
  auto range = table.by_hash.equal_range(hash);
  for (auto it = range.first; it != range.second; ++it) {
    if (it->second->dtype == dtype && dims == it->second->dims) {
      return it->second;
    }
  }
  const int64_t numel = std::accumulate(dims.begin(), dims.end(), int64_t{1}, std::multiplies<>());
  table.layouts.push_back(Layout{static_cast<uint32_t>(table.layouts.size()), dtype, dims.vec(), numel});
  const Layout* layout = &table.layouts.back();
  table.by_hash.emplace(hash, layout);
  return layout;
}

const Layout* layout_by_id(uint32_t id) {
  auto& table = interner();
  std::lock_guard<std::mutex> guard(table.mutex);
  return &table.layouts.at(id);
}

MemoryOrder memory_order(c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  MemoryOrder order{.dense = true, .permutation = {}};
  order.permutation.resize(sizes.size());
  std::iota(order.permutation.begin(), order.permutation.end(), 0);
  if (std::find(sizes.begin(), sizes.end(), 0) != sizes.end()) {
    return order; // nothing in it: any order will do
  }
  const auto is_dense = [&] {
    int64_t expected = 1;
    for (auto it = order.permutation.rbegin(); it != order.permutation.rend(); ++it) {
      if (sizes[*it] != 1 && strides[*it] != expected) {
        return false;
      }
      expected *= sizes[*it];
    }
    return true;
  };
  if (is_dense()) { // contiguous, the usual case
    return order;
  }
  c10::SmallVector<int64_t, 6> places;
  for (int64_t dim : order.permutation) {
    if (sizes[dim] != 1) {
      places.push_back(dim);
    }
  }
  auto sorted = places;
  std::stable_sort(
      sorted.begin(), sorted.end(), [&](int64_t some, int64_t other) { return strides[some] > strides[other]; });
  for (size_t i = 0; i < places.size(); ++i) {
    order.permutation[places[i]] = sorted[i];
  }
  order.dense = is_dense();
  return order;
}

const Layout* dense_layout(const MemoryOrder& order, c10::IntArrayRef sizes, c10::ScalarType dtype) {
  c10::SmallVector<int64_t, 6> dims;
  for (int64_t axis : order.permutation) {
    dims.push_back(sizes[axis]);
  }
  return intern_layout(dims, dtype);
}

namespace {

struct Dim {
  int64_t size;
  int64_t stride;
};
using Dims = c10::SmallVector<Dim, 6>;

constexpr int kFits = -2;

// One attempt to take `waiting` (ascending strides at the back) out of the base dims as digits.  Returns kFits, the
// base dim to join with the one behind it, or -1 where there is none.  `in_bounds` tells whether every digit fits the
// offset.
int match_digits(const c10::SmallVector<int64_t, 6>& base_dims, Dims waiting, int64_t offset, bool& in_bounds) {
  in_bounds = true;
  int64_t base_stride = 1;
  for (int j = static_cast<int>(base_dims.size()) - 1; j >= 0; --j) {
    const int64_t limit = base_stride * base_dims[j];
    Dims taken;
    while (!waiting.empty() && waiting.back().stride < limit) {
      Dim dim = waiting.pop_back_val();
      if (dim.stride % base_stride != 0) {
        return j;
      }
      if ((dim.size - 1) * dim.stride >= limit) {
        const int64_t count = limit / dim.stride;
        if (limit % dim.stride != 0 || dim.size % count != 0) {
          return j - 1;
        }
        waiting.push_back({dim.size / count, limit});
        dim.size = count;
      }
      taken.push_back(dim);
    }
    if (taken.empty()) {
      taken.push_back({1, base_stride});
    }
    for (size_t i = 0; i < taken.size(); ++i) {
      const int64_t stride = i == 0 ? base_stride : taken[i].stride;
      const int64_t step = i == 0 ? taken[0].stride / base_stride : 1;
      const int64_t upper = i + 1 < taken.size() ? taken[i + 1].stride : limit;
      const int64_t span = (taken[i].size - 1) * step + 1;
      const int64_t radix = upper / stride;
      if (upper % stride != 0 || span > radix) {
        return j - 1;
      }
      in_bounds = in_bounds && offset / stride % radix + span <= radix;
    }
    base_stride = limit;
  }
  return waiting.empty() ? kFits : -1;
}

} // namespace

bool is_box(c10::IntArrayRef base_dims, c10::IntArrayRef sizes, c10::IntArrayRef strides, int64_t offset) {
  Dims dims; // descending strides, neighbours that advance as one joined
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] == 0) {
      return true;
    }
    if (sizes[i] > 1 && strides[i] > 0) {
      dims.push_back({sizes[i], strides[i]});
    }
  }
  std::stable_sort(dims.begin(), dims.end(), [](const Dim& a, const Dim& b) { return a.stride > b.stride; });
  Dims joined;
  for (const Dim& dim : dims) {
    if (!joined.empty() && joined.back().stride == dim.size * dim.stride) {
      joined.back() = {joined.back().size * dim.size, dim.stride};
    } else {
      joined.push_back(dim);
    }
  }
  c10::SmallVector<int64_t, 6> base(base_dims.begin(), base_dims.end());
  while (true) {
    bool in_bounds = false;
    const int misfit = match_digits(base, joined, offset, in_bounds);
    if (misfit == kFits) {
      return in_bounds;
    }
    if (misfit < 0) {
      return false;
    }
    base[misfit] *= base[misfit + 1];
    base.erase(base.begin() + misfit + 1);
  }
}

} // namespace tpu
