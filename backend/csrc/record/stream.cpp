#include "record/stream.h"

#include "aten/autocast.h"
#include "python_error.h"
#include "record/settings.h"

#include <ATen/Context.h>
#include <pthread.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <optional>
#include <utility>

namespace tpu {
namespace {

// A program of fewer is launched faster than a thread is woken and the GIL handed over.
constexpr size_t kManyInputs = 32;

// While it is run a detached segment can be found by others.
class Running {
 public:
  Running(std::vector<Segment*>& all, Segment& segment) : all_(all), segment_(&segment) { all_.push_back(segment_); }
  ~Running() { all_.erase(std::find(all_.begin(), all_.end(), segment_)); }
  Running(const Running&) = delete;
  Running& operator=(const Running&) = delete;

 private:
  std::vector<Segment*>& all_;
  Segment* segment_;
};

std::atomic<Mode> g_mode{Mode::Fused};
std::atomic<Parts> g_parts{Parts::Never};
std::atomic<bool> g_pads_sizes{false};
std::atomic<bool> g_forked{false};

// Whether no gradient comes out of it: what is made of integers alone has none, wherever it is recorded.  A prompt is
// made before `generate` enters `no_grad`.
bool is_without_gradients(const EncodedCall& call) {
  const auto may_have_gradient = [](const TensorRef& tensor) {
    const auto dtype = tensor.buffer->layout->dtype;
    return c10::isFloatingType(dtype) || c10::isComplexType(dtype);
  };
  return torch::autograd::get_current_graph_task_id() < 0 &&
      (!caller_wants_gradients() || std::none_of(call.tensors.begin(), call.tensors.end(), may_have_gradient));
}

} // namespace

bool forked() {
  return g_forked.load(std::memory_order_relaxed);
}
void watch_forks() {
  pthread_atfork(nullptr, nullptr, [] { g_forked.store(true, std::memory_order_relaxed); });
}
void check_not_forked() {
  TORCH_CHECK(
      !forked(),
      "the tpu device cannot be used in a forked process (its parent had started it): keep tpu tensors out of it (a "
      "DataLoader's worker gives out CPU tensors), or start processes with multiprocessing's \"spawn\" or "
      "\"forkserver\"");
}

Mode mode() {
  return g_mode.load(std::memory_order_relaxed);
}
void set_mode(Mode mode) {
  g_mode.store(mode, std::memory_order_relaxed);
}

Parts parts() {
  return g_parts.load(std::memory_order_relaxed);
}
void set_parts(Parts parts) {
  g_parts.store(parts, std::memory_order_relaxed);
}

bool pads_sizes() {
  return g_pads_sizes.load(std::memory_order_relaxed);
}
void set_pads_sizes(bool pads_sizes) {
  g_pads_sizes.store(pads_sizes, std::memory_order_relaxed);
}

bool may_be_padded(const Segment& segment) {
  return pads_sizes() && mode() == Mode::Fused && !at::globalContext().deterministicAlgorithms() &&
      is_without_gradients(segment);
}

bool is_without_gradients(const Segment& segment) {
  return std::all_of(segment.circumstances.begin(), segment.circumstances.end(), [](uint64_t circumstances) {
    return (circumstances & kWithoutGradients) != 0;
  });
}

std::pair<std::vector<const Signature*>, size_t> RecentEntries::last() const {
  const auto recorded = recorded_.load(std::memory_order_acquire);
  const auto launched = launched_.load(std::memory_order_relaxed);
  const auto kept = std::min<uint64_t>(recorded, kKept);
  std::vector<const Signature*> entries;
  for (auto number = recorded - kept; number < recorded; ++number) {
    entries.push_back(ring_[number % kKept].load(std::memory_order_relaxed));
  }
  return {entries, std::min<uint64_t>(kept, recorded - std::min(launched, recorded))};
}

void Segment::clear() {
  tape.clear();
  hash = 0;
  entries.clear();
  circumstances.clear();
  values.clear();
  inputs.clear();
  is_input.clear();
  origin.clear();
  offsets.clear();
  numbers.clear();
  draws.clear();
  checked.clear();
  unchecked.clear();
  specialization = nullptr;
  position = nullptr;
}

void Segment::fail(const std::string& message) {
  const auto shared = std::make_shared<const std::string>(message);
  for (const auto& value : values) {
    if (value->array == nullptr && value->error == nullptr) {
      value->error = shared;
    }
  }
}

int32_t Stream::number(const ValuePtr& value, bool is_input, std::optional<int32_t> origin) {
  const auto local = static_cast<int32_t>(segment_.values.size());
  value->segment = segment_.serial;
  value->local = local;
  segment_.values.push_back(value);
  segment_.is_input.push_back(static_cast<uint8_t>(is_input));
  segment_.origin.push_back(origin.value_or(local));
  return local;
}

const Value& Stream::readable(Buffer* buffer) {
  if (!buffer->value) { // read before it was written: some value, the same in every mode
    EncodedCall call;
    call.words.push_back(kBuiltinZeros);
    call.words.push_back(buffer->layout->id);
    append(*builtin_signature(kBuiltinZeros, call, buffer->layout), call, {buffer});
  }
  const Value& value = *buffer->value;
  TORCH_CHECK(value.in_flight || value.error == nullptr, kNoValue, *value.error);
  return value;
}

int32_t Stream::link(Buffer* buffer) {
  readable(buffer);
  sink_->before_read(segment_, *buffer);
  const Value& value = *buffer->value;
  int32_t local = value.local;
  if (value.segment != segment_.serial) {
    local = static_cast<int32_t>(segment_.values.size());
    segment_.inputs.push_back(local);
    number(buffer->value, true, std::nullopt);
  }
  sink_->on_read(segment_, local, *buffer);
  return local;
}

bool Stream::belongs_to_ended_step(const EncodedCall& call) const {
  if (segment_.entries.empty()) { // it has no serial yet, as a value from the host has none
    return false;
  }
  bool reads_any = false;
  for (const auto& tensor : call.tensors) {
    if (!tensor.reads) {
      continue;
    }
    const Value* value = tensor.buffer->value.get();
    if (value == nullptr || value->segment != segment_.serial ||
        segment_.is_input[segment_.origin[value->local]] != 0) {
      return false;
    }
    reads_any = true;
  }
  return reads_any;
}

bool Stream::is_written_twice(c10::ArrayRef<Buffer*> outputs) {
  ++last_mark_;
  for (Buffer* buffer : outputs) {
    if (buffer != nullptr && std::exchange(buffer->mark, last_mark_) == last_mark_) {
      return true;
    }
  }
  return false;
}

void Stream::append(
    const Signature& signature, const EncodedCall& call, c10::ArrayRef<Buffer*> outputs, UserPlace place) {
  const bool is_cut = is_full() || (step_ended_ && !belongs_to_ended_step(call));
  if (is_cut && (mutex_.is_idle() || !mutex_.must_not_wait())) {
    if (is_full()) {
      sink_->on_full();
    }
    cut();
  }
  if (segment_.serial == 0) {
    segment_.serial = next_serial_++;
  }
  // Values that were never written become entries of their own, before this one.
  for (const auto& tensor : call.tensors) {
    if (tensor.reads) {
      readable(tensor.buffer);
    }
  }
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (signature.outputs[i].partial && !signature.outputs[i].skip) {
      readable(outputs[i]);
    }
  }
  segment_.push(signature.id);
  if (signature.reads_precision) { // a setting of PyTorch's that shapes the program
    segment_.push(static_cast<uint32_t>(matmul_precision()));
  }
  if (signature.checked) {
    segment_.checked.push_back({static_cast<uint32_t>(segment_.entries.size()), signature.id, std::move(place)});
  }
  segment_.entries.push_back(&signature);
  segment_.circumstances.push_back(
      call.circumstances | (pads_sizes() && is_without_gradients(call) ? kWithoutGradients : 0));
  for (const auto& tensor : call.tensors) {
    if (tensor.reads) {
      segment_.push(static_cast<uint32_t>(link(tensor.buffer)));
    }
  }
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (signature.outputs[i].partial && !signature.outputs[i].skip) {
      segment_.push(static_cast<uint32_t>(link(outputs[i])));
    }
  }
  segment_.offsets.insert(segment_.offsets.end(), call.offsets.begin(), call.offsets.end());
  auto& numbers = segment_.numbers;
  for (const auto& number : call.numbers) {
    if (number.is_integer) {
      numbers.integers.push_back(number.integer);
    } else if (signature.wide) {
      numbers.doubles.push_back(number.real);
    } else {
      numbers.floats.push_back(static_cast<float>(number.real));
    }
  }
  if (call.generator.defined()) {
    const size_t place = numbers.integers.size() - 2;
    segment_.draws.push_back({place, call.generator, signature.op->num_draws});
  }
  sink_->on_entry(segment_, signature, call);
  for (size_t i = 0; i < outputs.size(); ++i) {
    const auto& output = signature.outputs[i];
    Buffer* buffer = outputs[i];
    if (output.skip) {
      continue;
    }
    std::optional<int32_t> origin;
    if (buffer->value && buffer->value->segment == segment_.serial) {
      origin = segment_.origin[buffer->value->local];
    }
    auto value = c10::make_intrusive<Value>(output.layout);
    number(value, false, origin);
    sink_->on_write(*buffer, *value, /*by_entry=*/true);
    buffer->value = std::move(value);
    buffer->layout = output.layout;
    if (buffer->maker == kNoMaker) { // `ones` is `empty`, then `fill_`
      buffer->maker = signature.id;
    }
  }
  recent.add(signature);
  ++counters.ops_recorded;
}

bool Stream::is_full() const {
  size_t num_entries = segment_.entries.size();
  for (const auto& segment : sealed_) {
    num_entries += segment.entries.size();
  }
  return num_entries >= kMaxEntries;
}

Segment Stream::detach() {
  Segment detached = std::move(segment_);
  detached.num_recorded = recent.num_recorded();
  segment_ = std::move(spare_);
  segment_.clear();
  segment_.serial = 0;
  return detached;
}

void Stream::cut(std::shared_ptr<Sink> next) {
  if (!mutex_.must_not_wait()) {
    mutex_.wait_until_idle();
  }
  if (segment_.entries.empty() && sealed_.empty()) {
    sink_ = next ? std::move(next) : sink_;
    return;
  }
  settle();
  const StreamTurn turn(mutex_);
  pybind11::gil_scoped_acquire gil;
  drain_released_references();
  const auto sink = sink_; // of what was recorded so far
  sink_ = next ? std::move(next) : sink_;
  while (!sealed_.empty()) {
    hand_over_next(*sink);
  }
  if (!segment_.entries.empty()) {
    hand_over_next(*sink);
  }
}

void Stream::cut_all() {
  do {
    cut();
  } while (!segment_.entries.empty() || !sealed_.empty());
}

bool Stream::waits_for_outer_turn(const Segment& segment) const {
  return std::any_of(segment.inputs.begin(), segment.inputs.end(), [&](int32_t local) {
    const Value& value = *segment.values[local];
    return value.array == nullptr && value.error == nullptr;
  });
}

void Stream::hand_over_next(Sink& sink) {
  const bool was_open = sealed_.empty();
  // Only inside another turn: else all that was recorded before has been run.
  TORCH_CHECK(!waits_for_outer_turn(was_open ? segment_ : sealed_.front()), kBeingCompiled);
  const bool step_ended = (was_open || segment_.entries.empty()) && std::exchange(step_ended_, false);
  Segment running = was_open ? detach() : std::move(sealed_.front());
  if (!was_open) {
    sealed_.pop_front();
  }
  std::exception_ptr interrupt;
  const auto give_up = [&](bool is_interrupt, const std::string& message) {
    if (is_interrupt) {
      step_ended_ |= step_ended;
      keep_for_later(std::move(running), was_open);
      return;
    }
    running.fail(kProgramFailed + message);
    if (const auto position = std::move(running.position)) {
      reach(*position, /*waits=*/false);
    }
    add_range_checks(running); // of the launches before the one that failed
    range_checks_.raise_old();
  };
  try {
    const Running shown(running_, running);
    interrupt = sink.take(programs_, running, counters);
  } catch (const pybind11::error_already_set& error) {
    give_up(is_interrupt(error), error.what());
    throw;
  } catch (const c10::Error& error) {
    give_up(false, error.what_without_backtrace());
    throw;
  } catch (const std::exception& error) {
    give_up(false, error.what());
    throw;
  }
  if (sink.launches()) {
    recent.launched(running.num_recorded);
  }
  const auto position = std::move(running.position);
  add_range_checks(running);
  running.clear();
  spare_ = std::move(running);
  if (position) {
    reach(*position, /*waits=*/sink.launches() && !interrupt);
  }
  if (interrupt) { // what was found out of range is told at the next launch or read
    std::rethrow_exception(interrupt);
  }
  range_checks_.raise_old();
}

void Stream::keep_for_later(Segment segment, bool was_open) {
  if (!was_open || !segment_.entries.empty() || !sealed_.empty()) {
    sealed_.push_front(std::move(segment));
    return;
  }
  segment_ = std::move(segment);                                    // what is recorded from now on joins it
  for (size_t local = 0; local < segment_.values.size(); ++local) { // another one may have numbered them meanwhile
    segment_.values[local]->segment = segment_.serial;
    segment_.values[local]->local = static_cast<int32_t>(local);
  }
}

void Stream::reach(Position& position, bool waits) {
  const auto is_reached = [&] {
    position.time = std::chrono::steady_clock::now();
    position.is_pending = false;
  };
  position.num_launched = programs_.num_launched();
  try {
    if (position.is_timed && waits) {
      const StreamUnlocked unlocked(mutex_);
      wait(position.num_launched);
    }
  } catch (...) { // an index was out of range
    is_reached();
    throw;
  }
  is_reached();
}

std::shared_ptr<Position> Stream::mark(bool is_timed) {
  const auto behind = [&](Segment& segment) {
    if (!segment.position) {
      segment.position = std::make_shared<Position>();
    }
    segment.position->is_timed |= is_timed;
    return segment.position;
  };
  if (!segment_.entries.empty()) {
    auto position = behind(segment_);
    if (is_timed) {
      sealed_.push_back(detach());
    }
    return position;
  }
  if (!sealed_.empty()) {
    return behind(sealed_.back());
  }
  if (!running_.empty()) {
    return behind(*running_.front());
  }
  auto position = std::make_shared<Position>();
  position->num_launched = programs_.num_launched() + num_untaken_;
  position->is_pending = false;
  return position;
}

size_t Stream::dispatch(const Position& position) {
  if (position.is_pending && !mutex_.must_not_wait()) {
    mutex_.wait_until_idle();
  }
  if (position.is_pending) {
    cut();
    TORCH_CHECK(!position.is_pending, kBeingCompiled);
  }
  if (position.num_launched > programs_.num_launched()) {
    settle();
  }
  return std::min(position.num_launched, programs_.num_launched());
}

void Stream::drop(Segment& segment, const std::string& message) {
  segment.fail(message);
  if (segment.position) {
    reach(*segment.position, /*waits=*/false);
  }
  segment.clear();
  segment.serial = 0;
}

void Stream::add_range_checks(Segment& segment) {
  for (auto& check : segment.unchecked) {
    range_checks_.add(std::move(check));
  }
}

void Stream::drop_recorded(const std::string& message) {
  for (auto& segment : std::exchange(sealed_, {})) {
    drop(segment, message);
  }
  drop(segment_, message);
  step_ended_ = false;
}

void Stream::cut_after(const Signature& signature, c10::ArrayRef<Buffer*> outputs) {
  if (mode() != Mode::Debug) {
    cut();
    return;
  }
  std::optional<std::string> failure;
  try {
    cut();
  } catch (const c10::Error& error) {
    failure = error.what_without_backtrace();
  }
  pybind11::gil_scoped_acquire gil;
  pybind11::list arrays;
  for (Buffer* buffer : outputs) {
    if (buffer != nullptr && buffer->value && buffer->value->array != nullptr) {
      arrays.append(pybind11::handle(buffer->value->array));
    }
  }
  const StreamUnlocked unlocked(mutex_); // it waits for the device, where a function of the user's may be called back
  auto done = pybind11::reinterpret_steal<pybind11::object>(PyObject_CallFunction(
      runtime().after_debug_op,
      "IOz",
      static_cast<unsigned int>(signature.id),
      arrays.ptr(),
      failure.has_value() ? failure->c_str() : nullptr));
  if (!done) {
    throw_python_error();
  }
  raise_range_errors(programs_.num_launched());
}

void Stream::wait(size_t num_launched) {
  pybind11::list tokens;
  for (const auto& launch : programs_.launched(num_launched)) {
    tokens.append(pybind11::handle(launch.token.get()));
  }
  auto done = pybind11::reinterpret_steal<pybind11::object>(PyObject_CallOneArg(runtime().wait, tokens.ptr()));
  if (!done) {
    throw_python_error();
  }
  num_waited_ = std::max(num_waited_, num_launched);
  raise_range_errors(num_launched);
}

bool Stream::done(size_t num_launched) {
  // A launch's token may be there a moment before its results say that they are.
  if (num_launched <= num_waited_) {
    return true;
  }
  for (const auto& launch : programs_.launched(num_launched)) {
    const ValuePtr value = launch.output.lock();
    if (!value) {
      const auto waiter = pybind11::module_::import("tpu_backend.runtime.waiter");
      if (!waiter.attr("is_done")(pybind11::handle(launch.token.get())).cast<bool>()) {
        return false;
      }
      continue;
    }
    if (value->array == nullptr) { // dropped, see Link: only asked for inside a turn
      continue;
    }
    const pybind11::handle array(value->array);
    // Another thread may just have given its memory to a later program.
    if (!array.attr("is_deleted")().cast<bool>() && !array.attr("is_ready")().cast<bool>()) {
      return false;
    }
  }
  return true;
}

void Stream::copy_resized(Buffer* from, Buffer* to) {
  if (!from->value || from->nbytes == 0 || to->nbytes == 0) {
    return;
  }
  EncodedCall call;
  call.words.push_back(kBuiltinResize);
  call.words.push_back(from->layout->id);
  call.words.push_back(to->layout->id);
  call.tensors.push_back({from, true});
  append(*builtin_signature(kBuiltinResize, call, to->layout), call, {to});
}

ValuePtr Stream::concrete(Buffer* buffer) {
  const ValuePtr value = buffer->value; // the buffer may get another one meanwhile
  if (!value) {
    return value;
  }
  const auto is_pending = [&] {
    return value->array == nullptr && value->error == nullptr;
  };
  if (value->in_flight) {
    settle();
  } else if (is_pending()) {
    if (!mutex_.must_not_wait()) {
      mutex_.wait_until_idle();
    }
    if (is_pending()) {
      cut();
    }
    TORCH_CHECK(!is_pending(), kBeingCompiled);
  }
  TORCH_CHECK(value->error == nullptr, kNoValue, *value->error);
  return value;
}

void Stream::forget_programs() {
  TORCH_CHECK(sink_ == run_, "in a captured step, a region or a rehearsal a process cannot join others");
  cut_all();
  settle();
  programs_.forget();
}

void Stream::move_values(const std::function<PyObject*(PyObject*)>& moved) {
  std::vector<ValuePtr> values;
  for_each_live_buffer(device_, [&](Buffer& buffer) {
    if (buffer.value && buffer.value->array != nullptr) {
      values.push_back(buffer.value);
    }
  });
  std::sort(values.begin(), values.end());
  values.erase(std::unique(values.begin(), values.end()), values.end()); // clones share one
  for (const auto& value : values) {
    PyObject* const before = std::exchange(value->array, moved(value->array));
    value->leased = false;
    Py_DECREF(before);
  }
}

void Stream::overwrite(Buffer* buffer, const Layout* layout, PyObject* owned_array) {
  assign(buffer, c10::make_intrusive<Value>(layout, owned_array));
}

void Stream::assign(Buffer* buffer, ValuePtr value) {
  sink_->on_write(*buffer, *value, /*by_entry=*/false);
  buffer->layout = value->layout;
  buffer->value = std::move(value);
}

void Stream::share(Buffer* from, Buffer* to) {
  sink_->before_share(segment_, *from);
  assign(to, from->value);
}

void Stream::note_host_read() {
  ++counters.host_reads;
  sink_->on_host_read();
}

bool Stream::queues(size_t num_inputs) const {
  return has_launcher_ && num_inputs >= kManyInputs;
}

void Stream::get_ready_to_launch(size_t num_inputs) {
  if (queues(num_inputs)) {
    take_launches();
  } else {
    settle();
  }
}

bool Stream::launch_again(std::unique_ptr<Launch> launch, const std::vector<const Signature*>& entries) {
  const bool is_queued = queues(launch->inputs.size());
  if (!is_queued) {
    launch->run();
    launches_.push_back(std::move(launch));
  } else {
    for (const auto& value : launch->outputs) {
      value->in_flight = true;
    }
    launcher_.add(std::move(launch));
    has_queued_ = true;
  }
  ++num_untaken_;
  for (const auto* signature : entries) {
    recent.add(*signature);
  }
  recent.launched(recent.num_recorded());
  ++counters.segments_run;
  ++counters.memory_hits;
  ++counters.replays;
  sink_->on_other_launch(); // for the step that another thread records, a program of its own
  return is_queued;
}

void Stream::settle() {
  if (std::exchange(has_queued_, false)) {
    launcher_.wait();
    take_launches();
  }
}

void Stream::stop_launcher() {
  has_launcher_ = false;
  settle();
}

void Stream::take_launches() {
  auto launches = std::exchange(launches_, {});
  for (auto& launch : launcher_.take_done()) {
    launches.push_back(std::move(launch));
  }
  if (launches.empty()) {
    return;
  }
  num_untaken_ -= launches.size();
  pybind11::gil_scoped_acquire gil; // who waits for launches holds it, and no lock
  std::shared_ptr<const std::string> error;
  for (const auto& launch : launches) {
    for (const auto& value : launch->outputs) {
      value->in_flight = false;
    }
    if (launch->token == nullptr) {
      error = error == nullptr && !launch->is_followup ? launch->error : error;
      continue;
    }
    launch->specialization->spare = std::move(launch->spare);
    programs_.remember(launch->token, launch->outputs.empty() ? ValuePtr() : launch->outputs.front());
    launch->specialization->last_launch = programs_.num_launched();
    for (const auto& value : launch->outputs) {
      value->launch = programs_.num_launched();
    }
    if (launch->out_of_range != nullptr) {
      range_checks_.add(
          {programs_.num_launched(),
           launch->token,
           launch->out_of_range,
           launch->specialization->links.front().bounds_checks,
           std::move(launch->checked)});
    }
  }
  launches.clear();
  if (error != nullptr) {
    throw_torch_error(*error);
  }
  range_checks_.raise_old();
}

} // namespace tpu
