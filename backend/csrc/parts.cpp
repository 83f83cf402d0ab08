#include "parts.h"

#include "repeats.h"

#include <algorithm>
#include <map>
#include <unordered_map>

namespace tpu {
namespace {

// Shorter stretches are not worth a launch of their own.
constexpr size_t kShortestRepeat = 12;

// What a segment must repeat to be cut at all.  Two layers compile no sooner apart: the first step of a Llama (115 entries
// a layer) took 1.0 (2 layers), 0.9 (4) and 0.4 (12) times as long as with one program.
constexpr size_t kFewestTimes = 3;
constexpr size_t kFewestSaved = 100; // entries that need not be compiled
constexpr size_t kFewestSavedInTurn = 40; // where the same is compiled for several sizes

// How often a loop must come round to be cut at its turns: two sizes show what grows.
constexpr size_t kFewestTurns = 3;

uint64_t mixed(uint64_t hash, uint64_t word) {
  hash = (hash ^ word) * 0x9fb21c651e98df25ULL;
  return hash ^ hash >> 29;
}

// For each place between two entries: the bytes of the values that are made before it and read after it.
std::vector<uint64_t> crossing_bytes(const Segment& whole) {
  const size_t num_entries = whole.entries.size();
  std::vector<size_t> last_read(whole.values.size(), 0);
  std::vector<uint64_t> change(num_entries + 2, 0);
  for (size_t entry = 0; entry < num_entries; ++entry) {
    for (const uint32_t local : whole.links_of(entry)) {
      last_read[local] = entry;
    }
  }
  for (size_t entry = 0; entry < num_entries; ++entry) {
    for (size_t local = whole.marks[entry].values; local < whole.mark_after(entry).values; ++local) {
      if (whole.is_input[local] == 0 && last_read[local] > entry) {
        change[entry + 1] += whole.values[local]->layout->nbytes();
        change[last_read[local] + 1] -= whole.values[local]->layout->nbytes();
      }
    }
  }
  uint64_t bytes = 0;
  for (auto& each : change) {
    each = bytes += each;
  }
  return change;
}

class Planner {
 public:
  explicit Planner(const Segment& whole) : whole_(whole) {
    for (const auto* signature : whole.entries) {
      calls_.push_back(std::make_shared<const ListCall>(list_call(*signature)));
    }
  }

  PartPlan plan() {
    const size_t num_entries = whole_.entries.size();
    const auto turns = turns_that_grow();
    if (turns.empty()) {
      return plan(0, num_entries, kFewestSaved);
    }
    PartPlan all;
    const auto add_all = [&](size_t begin, size_t end) {
      for (auto& part : plan(begin, end, kFewestSavedInTurn)) {
        for (auto& piece : part) {
          piece.is_of_turn = true;
        }
        all.push_back(std::move(part));
      }
    };
    size_t done = 0;
    for (const auto& turn : turns) {
      add_all(done, turn.begin);
      for (size_t time = 0; time < turn.times; ++time) {
        done = turn.begin + time * turn.length;
        add_all(done, done + turn.length);
      }
      done += turn.length;
    }
    add_all(done, num_entries);
    return all;
  }

 private:
  // The turns of loops that differ in sizes alone.  An operation and how many words its form has tell enough: whether
  // turns share a program is decided elsewhere.
  std::vector<Repeat> turns_that_grow() {
    if (!is_without_gradients(whole_)) {
      return {};
    }
    std::vector<uint64_t> classes;
    for (const auto* signature : whole_.entries) {
      classes.push_back(mixed(signature->words[0], signature->words.size()));
    }
    crossing_ = crossing_bytes(whole_);
    auto turns = find_repeats(classes, crossing_, kShortestRepeat);
    std::erase_if(turns, [&](const Repeat& repeat) { return repeat.times < kFewestTurns || !grows(repeat); });
    return turns;
  }

  // Whether most turns differ from those before them.
  bool grows(const Repeat& repeat) const {
    size_t num_changed = 0;
    for (size_t time = 1; time < repeat.times; ++time) {
      const auto turn = whole_.entries.begin() + static_cast<int64_t>(repeat.begin + time * repeat.length);
      const auto length = static_cast<int64_t>(repeat.length);
      num_changed += std::equal(turn, turn + length, turn - length) ? 0 : 1;
    }
    return 2 * num_changed >= repeat.times;
  }

  PartPlan plan(size_t first, size_t num_entries, size_t fewest_saved) {
    most_times_ = num_saved_ = 0;
    has_single_graph_ = false;
    plan_.clear();
    for (size_t begin = first; begin < num_entries;) {
      const size_t length = calls_[begin]->length;
      std::unordered_map<uint32_t, int32_t> made; // by local: of which element
      size_t end = begin;
      while (end < num_entries && calls_[end]->length == length && keeps_elements_apart(end, made)) {
        ++end;
      }
      if (length == 0) {
        add_stretch(begin, end);
      } else {
        add_lists(begin, end, length);
      }
      begin = end;
    }
    if (most_times_ < kFewestTimes || num_saved_ < fewest_saved || has_single_graph_) {
      plan_.clear();
      add(first, num_entries);
    }
    join_what_is_not_shared();
    return std::move(plan_);
  }

  // Whether an entry on lists reads, of what the entries on lists before it have made, the same element alone: then the
  // elements can be taken one after the other.
  bool keeps_elements_apart(size_t entry, std::unordered_map<uint32_t, int32_t>& made) const {
    const auto& outputs = whole_.entries[entry]->outputs;
    const auto links = whole_.links_of(entry);
    size_t next = 0;
    const auto is_apart = [&](int32_t element) {
      const auto found = made.find(links[next++]);
      return found == made.end() || found->second == element;
    };
    if (calls_[entry]->length == 0) {
      return true;
    }
    for (const auto& leaf : calls_[entry]->leaves) {
      if (leaf.is_tensor && leaf.reads && !is_apart(leaf.element)) {
        return false;
      }
    }
    for (const auto& output : outputs) {
      if (output.partial && !output.skip && !is_apart(output.element)) {
        return false;
      }
    }
    size_t local = whole_.marks[entry].values;
    for (const auto& output : outputs) {
      if (!output.skip) {
        while (whole_.is_input[local] != 0) {
          ++local;
        }
        made[static_cast<uint32_t>(local++)] = output.element;
      }
    }
    return true;
  }

  // A part that no other one is like is none: it is joined to its neighbour, if that is no better.
  void join_what_is_not_shared() {
    std::map<std::vector<uint64_t>, size_t> times;
    const auto key_of = [&](const std::vector<Piece>& part) {
      std::vector<uint64_t> key;
      for (const auto& piece : part) {
        key.push_back(mixed(piece.signature->id, whole_.precision_of(piece.entry)));
      }
      return key;
    };
    for (const auto& part : plan_) {
      ++times[key_of(part)];
    }
    PartPlan joined;
    bool is_open = false; // the last of them is shared by nobody
    for (auto& part : plan_) {
      const bool is_shared = times[key_of(part)] > 1;
      if (is_open && !is_shared) {
        joined.back().insert(joined.back().end(), part.begin(), part.end());
      } else {
        joined.push_back(std::move(part));
      }
      is_open = !is_shared;
    }
    plan_ = std::move(joined);
  }

  void note(const Repeat& repeat, size_t entries_a_place) {
    most_times_ = std::max(most_times_, repeat.times);
    num_saved_ += (repeat.times - 1) * repeat.length * entries_a_place;
  }

  void add(size_t begin, size_t end) {
    if (begin == end) {
      return;
    }
    auto& part = plan_.emplace_back();
    for (size_t entry = begin; entry < end; ++entry) {
      part.push_back({entry, whole_.entries[entry], nullptr, 0, 0});
    }
  }

  // Entries that no others repeat.
  void add_single(size_t begin, size_t end) {
    for (size_t entry = begin; entry < end; ++entry) {
      const OpInfo* op = whole_.entries[entry]->op;
      has_single_graph_ |= op != nullptr && op->is_graph;
    }
    add(begin, end);
  }

  void add_stretch(size_t begin, size_t end) {
    if (crossing_.empty()) {
      crossing_ = crossing_bytes(whole_);
    }
    std::vector<uint64_t> words;
    for (size_t entry = begin; entry < end; ++entry) {
      words.push_back(mixed(whole_.entries[entry]->id, whole_.precision_of(entry)));
    }
    size_t done = begin;
    for (const auto& repeat : find_repeats(words, c10::ArrayRef<uint64_t>(crossing_).slice(begin, end - begin), kShortestRepeat)) {
      note(repeat, 1);
      add_single(done, begin + repeat.begin);
      for (size_t time = 0; time < repeat.times; ++time) {
        done = begin + repeat.begin + time * repeat.length;
        add(done, done + repeat.length);
      }
      done += repeat.length;
    }
    add_single(done, end);
  }

  // Entries [begin, end) all take lists of this length.
  void add_lists(size_t begin, size_t end, size_t length) {
    std::vector<uint64_t> elements(length, 0); // what is the same for two elements that the entries treat alike
    for (size_t entry = begin; entry < end; ++entry) {
      const auto& words = whole_.entries[entry]->words;
      for (const auto& leaf : calls_[entry]->leaves) {
        for (size_t at = leaf.begin; leaf.element >= 0 && at < leaf.end; ++at) {
          elements[leaf.element] = mixed(elements[leaf.element], words[at]);
        }
      }
    }
    const auto repeats = find_repeats(elements, std::vector<uint64_t>(length + 1, 0), 1);
    if (repeats.empty()) {
      add(begin, end);
      return;
    }
    const auto add_elements = [&](size_t first, size_t last) {
      if (first == last) {
        return;
      }
      auto& part = plan_.emplace_back();
      for (size_t entry = begin; entry < end; ++entry) {
        const auto& call = calls_[entry];
        part.push_back({entry, part_of_lists(*whole_.entries[entry], *call, first, last), call, first, last});
      }
    };
    size_t done = 0;
    for (const auto& repeat : repeats) {
      note(repeat, end - begin);
      add_elements(done, repeat.begin);
      for (size_t time = 0; time < repeat.times; ++time) {
        done = repeat.begin + time * repeat.length;
        add_elements(done, done + repeat.length);
      }
      done += repeat.length;
    }
    add_elements(done, length);
  }

  const Segment& whole_;
  std::vector<std::shared_ptr<const ListCall>> calls_; // by entry
  std::vector<uint64_t> crossing_;
  size_t most_times_{0};
  size_t num_saved_{0};
  bool has_single_graph_{false}; // of torch.compile: it may take longer than all that might be shared
  PartPlan plan_;
};

// Builds one part; the locals of the whole become its own.
class PartBuilder {
 public:
  PartBuilder(const Segment& whole) : whole_(whole), own_(whole.values.size(), -1), newest_(whole.values.size()) {
    for (size_t local = 0; local < newest_.size(); ++local) {
      newest_[local] = static_cast<int32_t>(local);
    }
  }

  Segment build(const std::vector<Piece>& pieces) {
    for (const auto& piece : pieces) {
      add(piece);
    }
    for (const auto& [origin, local] : written_) {
      newest_[origin] = local;
    }
    written_.clear();
    for (const int32_t local : seen_) {
      own_[local] = -1;
    }
    seen_.clear();
    return std::exchange(part_, {});
  }

 private:
  void add(const Piece& piece) {
    const auto& entry = *whole_.entries[piece.entry];
    part_.push(piece.signature->id);
    if (entry.reads_precision) {
      part_.push(whole_.precision_of(piece.entry));
    }
    if (entry.checked) { // none of those on lists is; the others come in their order
      part_.checked.push_back(whole_.checked[num_checked_++]);
      part_.checked.back().entry = static_cast<uint32_t>(part_.entries.size());
    }
    part_.entries.push_back(piece.signature);
    part_.circumstances.push_back(whole_.circumstances[piece.entry]);
    add_links(piece, entry);
    add_numbers(piece, entry);
    add_outputs(piece, entry);
  }

  void link(uint32_t local) {
    if (own_[local] < 0) {
      part_.inputs.push_back(number(static_cast<int32_t>(local), true, static_cast<int32_t>(part_.values.size())));
    }
    part_.push(static_cast<uint32_t>(own_[local]));
  }

  int32_t number(int32_t local, bool is_input, int32_t origin) {
    own_[local] = static_cast<int32_t>(part_.values.size());
    seen_.push_back(local);
    part_.values.push_back(whole_.values[local]);
    part_.is_input.push_back(static_cast<uint8_t>(is_input));
    part_.origin.push_back(origin);
    return own_[local];
  }

  void add_links(const Piece& piece, const Signature& entry) {
    const auto links = whole_.links_of(piece.entry);
    if (!piece.lists) {
      for (const uint32_t local : links) {
        link(local);
      }
      return;
    }
    size_t next = 0;
    for (const auto& leaf : piece.lists->leaves) {
      if (leaf.is_tensor && leaf.reads) {
        const uint32_t local = links[next++];
        if (piece.takes(leaf.element)) {
          link(local);
        }
      }
    }
    for (const auto& output : entry.outputs) {
      if (output.partial && !output.skip) {
        const uint32_t local = links[next++];
        if (piece.takes(output.element)) {
          link(local);
        }
      }
    }
  }

  void add_numbers(const Piece& piece, const Signature& entry) {
    Mark at = whole_.marks[piece.entry];
    const Mark end = whole_.mark_after(piece.entry);
    auto& numbers = part_.numbers;
    if (!piece.lists) {
      const auto copy = [](auto& to, const auto& from, size_t first, size_t last) {
        to.insert(to.end(), from.begin() + static_cast<int64_t>(first), from.begin() + static_cast<int64_t>(last));
      };
      copy(part_.offsets, whole_.offsets, at.offsets, end.offsets);
      copy(numbers.floats, whole_.numbers.floats, at.floats, end.floats);
      copy(numbers.doubles, whole_.numbers.doubles, at.doubles, end.doubles);
      copy(numbers.integers, whole_.numbers.integers, at.integers, end.integers);
      for (const auto& draw : whole_.draws) {
        if (draw.place >= at.integers && draw.place < end.integers) {
          part_.draws.push_back({numbers.integers.size() - 2, draw.generator, draw.count});
        }
      }
      return;
    }
    for (const auto& leaf : piece.lists->leaves) {
      const bool is_wanted = piece.takes(leaf.element);
      const auto take = [&](auto& to, const auto& from, uint32_t& place) {
        if (is_wanted) {
          to.push_back(from[place]);
        }
        ++place;
      };
      if (leaf.has_offset) {
        take(part_.offsets, whole_.offsets, at.offsets);
      } else if (leaf.is_integer) {
        take(numbers.integers, whole_.numbers.integers, at.integers);
      } else if (leaf.is_real && entry.wide) {
        take(numbers.doubles, whole_.numbers.doubles, at.doubles);
      } else if (leaf.is_real) {
        take(numbers.floats, whole_.numbers.floats, at.floats);
      }
    }
  }

  void add_outputs(const Piece& piece, const Signature& entry) {
    size_t local = whole_.marks[piece.entry].values;
    for (const auto& output : entry.outputs) {
      if (output.skip) {
        continue;
      }
      while (whole_.is_input[local] != 0) {
        ++local;
      }
      const auto made = static_cast<int32_t>(local++);
      if (!piece.takes(output.element)) {
        continue;
      }
      int32_t origin = -1;
      if (const int32_t replaced = whole_.origin[made]; replaced >= 0) {
        // What its buffer held when the part began, if the part reads that.
        const int32_t before = own_[newest_[replaced]];
        origin = before >= 0 && part_.is_input[before] != 0 ? before : -1;
        written_.emplace_back(replaced, made);
      }
      number(made, false, origin);
    }
  }

  const Segment& whole_;
  Segment part_;
  std::vector<int32_t> own_; // by local of the whole: that of the part, or -1
  std::vector<int32_t> seen_;
  std::vector<int32_t> newest_; // by input of the whole: what its buffer held when the part began
  std::vector<std::pair<int32_t, int32_t>> written_;
  size_t num_checked_{0};
};

} // namespace

bool is_without_gradients(const Segment& segment) {
  return std::all_of(segment.circumstances.begin(), segment.circumstances.end(), [](uint64_t circumstances) {
    return (circumstances & kWithoutGradients) != 0;
  });
}

PartPlan plan_parts(const Segment& whole) {
  return Planner(whole).plan();
}

bool grows(const PartPlan& plan) {
  return !plan.empty() && plan.front().front().is_of_turn;
}

std::vector<Segment> take_apart(Segment& whole, const PartPlan& plan) {
  PartBuilder builder(whole);
  std::vector<Segment> parts;
  parts.reserve(plan.size());
  for (const auto& pieces : plan) {
    parts.push_back(builder.build(pieces));
  }
  whole.values.clear();
  return parts;
}

} // namespace tpu
