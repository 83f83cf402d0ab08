#include "launch/region.h"

#include "record/stream.h"

#include <pybind11/pybind11.h>

#include <set>

namespace py = pybind11;

namespace tpu {
namespace {

constexpr const char* kUndeclared = "it was computed in a region of torch.tpu.spmd and is none of its results: return "
                                    "it, or give it to the region's keep(tensor)";

void count(std::vector<int32_t>& counts, int32_t local, int32_t change) {
  if (counts.size() <= static_cast<size_t>(local)) {
    counts.resize(local + 1, 0);
  }
  counts[local] += change;
}

} // namespace

bool Region::begin(Stream& stream) {
  const auto is_alone = [&] {
    return stream.sink() == stream.run_sink();
  };
  if (!is_alone()) {
    return false;
  }
  stream.cut_all();
  stream.settle();
  if (!is_alone()) { // another thread had the lock meanwhile
    return false;
  }
  stream.set_sink(std::make_shared<Region>());
  return true;
}

std::vector<std::shared_ptr<PyObject>>
Region::end(Stream& stream, const std::optional<std::vector<at::Tensor>>& results, bool and_held) {
  const auto sink = stream.sink();
  auto& region = static_cast<Region&>(*sink);
  if (results) {
    region.results_.emplace();
    for (const auto& tensor : *results) {
      region.results_->push_back(buffer_of(tensor)->value);
    }
    if (and_held) {
      for_each_live_buffer(stream.device(), [&](Buffer& buffer) {
        if (buffer.value && region.computing(*buffer.value) != nullptr) {
          region.results_->push_back(buffer.value);
        }
      });
    }
  }
  try {
    stream.cut(stream.run_sink());
  } catch (...) {
    stream.set_sink(stream.run_sink());
    throw;
  }
  region.results_.reset();
  region.name_undeclared(stream.mutex());
  return std::move(region.executables_);
}

Region::Computed* Region::computing(const Value& value) {
  const auto found = value.array == nullptr && value.local >= 0 ? computed_.find(value.segment) : computed_.end();
  return found == computed_.end() ? nullptr : &found->second;
}

void Region::before_read(const Segment& segment, Buffer& buffer) {
  const Value& value = *buffer.value;
  if (value.segment != segment.serial) {
    if (auto* computed = computing(value)) { // an earlier segment, which a timed event has ended
      count(computed->num_holders, value.local, 1);
    }
    return;
  }
  if (segment.is_input[value.local] != 0 && value.array != nullptr && was_before(buffer) && !has_own_value(buffer) &&
      computed_[segment.serial].readers.at(value.local) != buffer.address) {
    give_own_value(buffer);
  }
}

void Region::before_share(const Segment& segment, Buffer& buffer) {
  const Value& value = *buffer.value;
  if (value.array == nullptr || !was_before(buffer) || has_own_value(buffer)) {
    return;
  }
  const bool is_numbered = segment.serial != 0 && value.segment == segment.serial;
  const bool is_first_reader = is_numbered && segment.is_input[value.local] != 0 &&
      computed_[segment.serial].readers.at(value.local) == buffer.address;
  if (!is_first_reader) { // who keeps the value: other older buffers get their own when they are read
    give_own_value(buffer);
  }
}

bool Region::has_own_value(const Buffer& buffer) const {
  const auto found = own_values_.find(buffer.address);
  return found != own_values_.end() && found->second == buffer.value.get();
}

// Which older buffers share a value depends on what was done before the region: to it each holds one of its own.
void Region::give_own_value(Buffer& buffer) {
  const Value& shared = *buffer.value;
  const py::gil_scoped_acquire gil; // for the array's count of references
  auto own = c10::make_intrusive<Value>(shared.layout, Py_NewRef(shared.array));
  own->leased = shared.leased;
  own->launch = shared.launch;
  own_values_[buffer.address] = own.get();
  buffer.value = std::move(own);
}

void Region::on_read(const Segment& segment, int32_t local, const Buffer& buffer) {
  if (segment.is_input[local] != 0) {
    computed_[segment.serial].readers.try_emplace(local, buffer.address);
  }
}

void Region::on_write(Buffer& buffer, const Value& value, bool by_entry) {
  own_values_.erase(buffer.address);
  if (by_entry) {
    computed_.try_emplace(value.segment);
  }
  if (buffer.value) {
    if (auto* computed = computing(*buffer.value)) {
      count(computed->num_holders, buffer.value->local, -1);
      computed->of_older.erase(buffer.address);
    }
  }
  if (auto* computed = computing(value)) {
    count(computed->num_holders, value.local, 1);
    if (was_before(buffer)) {
      computed->of_older[buffer.address] = value.local;
    }
  }
}

Results Region::results_of(const Segment& segment) const {
  std::set<int32_t> locals;
  const auto found = computed_.find(segment.serial);
  if (found == computed_.end()) { // no entry of it was recorded in here
    return {{}, Policy::Declared};
  }
  const Computed& computed = found->second;
  if (results_ && found == std::prev(computed_.end())) {
    for (const auto& [address, local] : computed.of_older) {
      locals.insert(local);
    }
    for (const auto& value : *results_) {
      if (value && value->segment == segment.serial && segment.is_input[value->local] == 0) {
        locals.insert(value->local);
      }
    }
  } else { // a cut in the middle: nobody knows yet what is wanted of it
    for (size_t local = 0; local < computed.num_holders.size(); ++local) {
      if (computed.num_holders[local] > 0) {
        locals.insert(static_cast<int32_t>(local));
      }
    }
  }
  return {{locals.begin(), locals.end()}, Policy::Declared};
}

std::exception_ptr Region::take(ProgramCache& programs, Segment& segment, Counters& counters) {
  auto results = results_of(segment);
  results.compares = std::exchange(was_cut_, true);
  auto interrupt = programs.run(segment, results, /*may_be_parts=*/true, counters);
  if (segment.specialization != nullptr) {
    for (const auto& link : segment.specialization->links) {
      executables_.push_back(link.executable);
    }
  }
  find_undeclared(segment);
  computed_.erase(segment.serial);
  return interrupt;
}

void Region::find_undeclared(const Segment& segment) {
  size_t local = 0;
  const auto why = std::make_shared<const std::string>(kUndeclared);
  for (const auto* signature : segment.entries) {
    for (const auto& output : signature->outputs) {
      if (output.skip) {
        continue;
      }
      while (segment.is_input[local] != 0) {
        ++local;
      }
      const ValuePtr& value = segment.values[local++];
      if (value.use_count() > 1 && value->array == nullptr && value->error == nullptr) {
        value->error = why;
        undeclared_.push_back({value, signature->id});
      }
    }
  }
}

void Region::name_undeclared(StreamMutex& mutex) {
  for (auto& [value, maker] : std::exchange(undeclared_, {})) {
    const auto line = [&, signature = maker] {
      const StreamUnlocked unlocked(mutex);
      return py::module_::import("tpu_backend.runtime.user_line").attr("first_line")(signature).cast<std::string>();
    }();
    value->error = std::make_shared<const std::string>(kUndeclared + (", at " + line));
  }
}

} // namespace tpu
