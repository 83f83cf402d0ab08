#include "repeats.h"

#include <algorithm>
#include <optional>

namespace tpu {
namespace {

class Finder {
 public:
  Finder(c10::ArrayRef<uint64_t> words, c10::ArrayRef<uint64_t> cost, size_t shortest)
      : words_(words), cost_(cost), shortest_(shortest) {}

  void find(size_t begin, size_t end, std::vector<Repeat>& found) const {
    const auto best = best_in(begin, end);
    if (!best.has_value()) {
      return;
    }
    find(begin, best->begin, found);
    found.push_back(*best);
    find(best->end(), end, found);
  }

 private:
  std::optional<Repeat> best_in(size_t begin, size_t end) const {
    std::optional<Repeat> best;
    size_t saved = 0;
    for (size_t length = shortest_; begin + 2 * length <= end; ++length) {
      size_t equal = 0; // words up to here that are the same one `length` further on
      for (size_t place = begin; place + length <= end; ++place) {
        if (place + length < end && words_[place] == words_[place + length]) {
          ++equal;
          continue;
        }
        const size_t times = 1 + equal / length;
        if ((times - 1) * length > saved) {
          saved = (times - 1) * length;
          best = Repeat{.begin = cheapest(place - equal, equal % length), .length = length, .times = times};
        }
        equal = 0;
      }
    }
    return best;
  }

  size_t cheapest(size_t first, size_t slack) const {
    const auto* begin = cost_.data() + first;
    return first + static_cast<size_t>(std::min_element(begin, begin + slack + 1) - begin);
  }

  c10::ArrayRef<uint64_t> words_;
  c10::ArrayRef<uint64_t> cost_;
  size_t shortest_;
};

} // namespace

std::vector<Repeat> find_repeats(c10::ArrayRef<uint64_t> words, c10::ArrayRef<uint64_t> cost, size_t shortest) {
  std::vector<Repeat> found;
  Finder(words, cost, shortest).find(0, words.size(), found);
  return found;
}

} // namespace tpu
