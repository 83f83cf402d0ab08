#include "stream.h"

#include "notes.h"
#include "parts.h"
#include "python_error.h"

#include <ATen/Context.h>
#include <pthread.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <optional>
#include <utility>

namespace tpu {
namespace {

// A program of fewer is launched faster than a thread is woken and the GIL handed over.
constexpr size_t kManyInputs = 32;

// Of a segment's layered runs, counted from 1, the one at which a thread begins to compile the one program that comes in the
// end.  Never the first, which shares its cores with nothing.  Where nobody said that fused steps will come, what is run less
// often (an initialisation, a look at a few batches) is not compiled a second time.
constexpr size_t kRunThatPrepares = 2;
constexpr size_t kRunThatPreparesUnasked = 32;

// The last run that is layered in fused mode that begins so.  A count, not a moment: the last digits change with it, and a script
// that is run again gives the same.  So many steps take longer than most programs, which the next run waits for (Llama of 32
// layers, two cores: 14 s, 0.25 s a step).
constexpr size_t kLastLayeredRun = 256;

constexpr const char* kRehearsed = "what is computed in torch.tpu.rehearsal has no value";

std::atomic<Mode> g_mode{Mode::Fused};
std::atomic<bool> g_compiles_ahead{false};
std::atomic<bool> g_begins_layered{false};
std::atomic<bool> g_forked{false};

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
      "DataLoader's worker gives out CPU tensors), or start processes with multiprocessing's \"spawn\" or \"forkserver\"");
}

Mode mode() {
  return g_mode.load(std::memory_order_relaxed);
}
void set_mode(Mode mode) {
  g_mode.store(mode, std::memory_order_relaxed);
}

bool compiles_ahead() {
  return g_compiles_ahead.load(std::memory_order_relaxed);
}
void set_compiles_ahead(bool compiles_ahead) {
  g_compiles_ahead.store(compiles_ahead, std::memory_order_relaxed);
}

bool begins_layered() {
  return g_begins_layered.load(std::memory_order_relaxed);
}
void set_begins_layered(bool begins_layered) {
  g_begins_layered.store(begins_layered, std::memory_order_relaxed);
}

StreamLock::StreamLock(std::recursive_mutex& mutex) : mutex_(mutex) {
  check_not_forked();
  // A finalizer that the garbage collector runs there: who holds the lock may be waiting for that thread.
  TORCH_CHECK(
      !Launcher::is_this_thread(),
      "the tpu device cannot be used by what Python runs on the thread that launches programs (a finalizer)");
  if (mutex_.try_lock()) {
    return;
  }
  if (Py_IsInitialized() && PyGILState_Check()) {
    PyThreadState* state = PyEval_SaveThread();
    mutex_.lock();
    PyEval_RestoreThread(state);
  } else {
    mutex_.lock();
  }
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

Mark Segment::end() const {
  const auto count = [](const auto& items) { return static_cast<uint32_t>(items.size()); };
  return {
      count(tape), count(values), count(offsets), count(numbers.floats), count(numbers.doubles), count(numbers.integers)};
}

void Segment::clear() {
  tape.clear();
  hash = 0;
  entries.clear();
  circumstances.clear();
  marks.clear();
  values.clear();
  inputs.clear();
  is_input.clear();
  origin.clear();
  offsets.clear();
  numbers.floats.clear();
  numbers.doubles.clear();
  numbers.integers.clear();
  draws.clear();
  checked.clear();
  variant = nullptr;
}

void Segment::fail(const std::string& message) {
  const auto shared = std::make_shared<const std::string>(message);
  for (const auto& value : values) {
    if (value->array == nullptr) {
      value->error = shared;
    }
  }
}

int32_t Stream::number(const ValuePtr& value, bool is_input, int32_t origin) {
  const auto local = static_cast<int32_t>(segment_.values.size());
  value->segment = segment_.serial;
  value->local = local;
  segment_.values.push_back(value);
  segment_.is_input.push_back(static_cast<uint8_t>(is_input));
  segment_.origin.push_back(origin);
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
  const Value& value = readable(buffer);
  int32_t local = value.local;
  if (value.segment != segment_.serial) {
    local = static_cast<int32_t>(segment_.values.size());
    segment_.inputs.push_back(local);
    number(buffer->value, true, local);
  }
  if (notes != nullptr && segment_.is_input[local] != 0) {
    notes->reads.emplace_back(local, buffer->address);
  }
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
    if (value == nullptr || value->segment != segment_.serial || segment_.origin[value->local] >= 0) {
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
  const bool is_full = segment_.entries.size() >= kMaxEntries;
  if (is_full && notes != nullptr) {
    notes->is_full = true;
  }
  if (is_full || (step_ended_ && !belongs_to_ended_step(call))) {
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
  segment_.marks.push_back(segment_.end());
  segment_.push(signature.id);
  if (signature.reads_precision) { // a setting of PyTorch's that shapes the program
    segment_.push(static_cast<uint32_t>(at::globalContext().float32MatmulPrecision()));
  }
  if (signature.checked) {
    segment_.checked.push_back({static_cast<uint32_t>(segment_.entries.size()), signature.id, std::move(place)});
  }
  segment_.entries.push_back(&signature);
  segment_.circumstances.push_back(call.circumstances);
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
    if (rehearsal_) {
      const auto at = [&](size_t which) { return static_cast<uint64_t>(numbers.integers[which]); };
      rehearsal_->keep(call.generator, at(place), at(place + 1));
    }
  }
  if (notes != nullptr) {
    notes->readers.resize(segment_.inputs.size(), signature.id);
    notes->float_takers.resize(numbers.floats.size(), signature.id);
    notes->double_takers.resize(numbers.doubles.size(), signature.id);
    notes->integer_takers.resize(numbers.integers.size(), signature.id);
  }
  for (size_t i = 0; i < outputs.size(); ++i) {
    const auto& output = signature.outputs[i];
    Buffer* buffer = outputs[i];
    if (output.skip) {
      continue;
    }
    int32_t origin = -1;
    if (buffer->value && buffer->value->segment == segment_.serial) {
      origin = segment_.origin[buffer->value->local];
    }
    if (rehearsal_) {
      rehearsal_->keep(*buffer);
    }
    auto value = c10::make_intrusive<Value>(output.layout);
    number(value, false, origin);
    buffer->value = std::move(value);
    buffer->layout = output.layout;
    if (buffer->maker == kNoMaker) { // `ones` is `empty`, then `fill_`
      buffer->maker = signature.id;
    }
  }
  recent.add(signature);
  ++counters.ops_recorded;
}

void Stream::cut() {
  if (segment_.entries.empty()) {
    return;
  }
  settle();
  Segment running = std::move(segment_);
  segment_ = std::move(spare_);
  segment_.clear();
  segment_.serial = 0;
  const bool step_ended = std::exchange(step_ended_, false);
  {
    pybind11::gil_scoped_acquire gil;
    drain_released_references();
    try {
      run(running);
    } catch (const pybind11::error_already_set&) { // Ctrl-C while it was compiled: what was recorded is kept
      if (segment_.entries.empty() && !running.values.empty()) {
        segment_ = std::move(running);
        step_ended_ = step_ended;
      } else {
        running.fail("it was interrupted");
      }
      throw;
    } catch (const c10::Error&) {
      check_launches(); // those before the one that failed
      throw;
    }
    if (!rehearsal_) {
      recent.launched();
    }
    if (notes != nullptr) {
      note_run(running);
    }
    running.clear();
    spare_ = std::move(running);
    check_launches();
  }
}

void Stream::check_launches() {
  for (auto& launch : std::exchange(unchecked_, {})) {
    range_checks_.add(launch.number, std::move(launch.offenders), launch.demands, std::move(launch.checked));
  }
}

void Stream::rehearse(Segment& segment) {
  programs_.rehearse(segment);
  segment.fail(kRehearsed);
}

void Stream::begin_rehearsal() {
  TORCH_CHECK(!rehearsal_, "torch.tpu.rehearsal inside another one");
  cut();
  settle();
  rehearsal_.emplace();
}

void Stream::end_rehearsal() {
  segment_.fail(kRehearsed); // what an error has left there
  segment_.clear();
  segment_.serial = 0;
  step_ended_ = false;
  rehearsal_->take_back();
  rehearsal_.reset();
}

bool Stream::may_be_layered(const Segment& segment) {
  if (notes != nullptr) {
    return false;
  }
  // Who asks for deterministic algorithms wants the same digits from the first run on.
  const bool begins = mode() == Mode::Fused && begins_layered() && !at::globalContext().deterministicAlgorithms() &&
      programs_.begins_layered(segment, kLastLayeredRun, counters);
  // Of what nobody can see nothing is run; a part would be seen by the next one.
  return (begins || mode() == Mode::Layered) && is_wanted(segment);
}

void Stream::run(Segment& segment) {
  if (rehearsal_) {
    rehearse(segment);
    return;
  }
  const auto run_whole = [&] {
    programs_.run(segment, counters);
    note_launch(segment);
  };
  if (!may_be_layered(segment)) {
    run_whole();
    return;
  }
  const PartPlan* plan = programs_.parts_of(segment);
  if (plan->size() <= 1) {
    run_whole();
    return;
  }
  const size_t run = programs_.num_layered(segment) + 1;
  const bool prepares =
      mode() == Mode::Layered ? compiles_ahead() && run >= kRunThatPrepares : run >= kRunThatPreparesUnasked;
  const auto whole = prepares ? programs_.description_to_prepare(segment) : pybind11::none();
  std::vector<Value*> values; // alive in the parts
  for (const auto& value : segment.values) {
    values.push_back(value.get());
  }
  auto parts = take_apart(segment, *plan);
  size_t num_run = 0;
  const auto fail_rest = [&](const std::string& message) {
    for (; num_run < parts.size(); ++num_run) {
      parts[num_run].fail(message);
    }
  };
  try {
    if (run == 1) { // before the first of them is run: Ctrl-C meanwhile loses nothing
      programs_.compile_all(parts, counters);
    }
    if (prepares) {
      programs_.prepare(segment, whole);
    }
    for (; num_run < parts.size(); ++num_run) {
      programs_.run(parts[num_run], counters);
      note_launch(parts[num_run]);
      parts[num_run].clear();
    }
    programs_.count_layered(segment);
    ++counters.segments_layered;
  } catch (const pybind11::error_already_set&) {
    if (num_run == 0) { // nothing is lost: the segment is what it was
      for (Value* value : values) {
        segment.values.push_back(ValuePtr::reclaim_copy(value));
      }
    } else {
      fail_rest("it was interrupted");
    }
    throw;
  } catch (const c10::Error& error) {
    fail_rest(error.what_without_backtrace());
    throw;
  } catch (const std::exception& error) {
    fail_rest(error.what());
    throw;
  }
}

void Stream::note_launch(Segment& segment) {
  if (PyObject* offenders = std::exchange(segment.offenders, nullptr)) {
    unchecked_.push_back(
        {programs_.num_launched(), shared_reference(offenders), segment.variant->demands, segment.checked});
  }
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
  raise_range_errors(num_launched);
}

bool Stream::done(size_t num_launched) {
  for (const auto& launch : programs_.launched(num_launched)) {
    const ValuePtr value = launch.output.lock();
    if (!value) {
      pybind11::handle(launch.token.get()).attr("block_until_ready")();
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

PyObject* Stream::concrete(Buffer* buffer) {
  if (!buffer->value) {
    return nullptr;
  }
  if (buffer->value->in_flight) {
    settle();
  } else if (buffer->value->array == nullptr && buffer->value->error == nullptr) {
    cut();
  }
  readable(buffer);
  TORCH_INTERNAL_ASSERT(buffer->value->array != nullptr, "a value is neither computed nor pending");
  return buffer->value->array;
}

void Stream::overwrite(Buffer* buffer, const Layout* layout, PyObject* owned_array) {
  assign(buffer, c10::make_intrusive<Value>(layout, owned_array));
}

void Stream::assign(Buffer* buffer, ValuePtr value) {
  if (rehearsal_) {
    rehearsal_->keep(*buffer);
  }
  buffer->layout = value->layout;
  buffer->value = std::move(value);
  if (is_noting()) {
    notes->written.push_back(buffer->address);
  }
}

void Stream::note_host_read() {
  ++counters.host_reads;
  if (notes != nullptr && !notes->first_read.has_value()) {
    notes->first_read = user_place();
  }
}

bool Stream::is_noting() const {
  return notes != nullptr && notes->thread == std::this_thread::get_id();
}

void Stream::note_run(const Segment& segment) {
  if (notes->num_cuts++ == 0) {
    notes->first_cut = user_place();
  }
  SegmentRun run{
      .variant = segment.variant == nullptr ? nullptr : segment.variant->shared_from_this(),
      .serial = segment.serial,
      .entries = segment.entries,
      .inputs = segment.inputs,
      .layouts = {},
      .is_input = segment.is_input,
      .offsets = segment.offsets,
      .numbers = segment.numbers,
      .draws = segment.draws,
      .checked = segment.checked};
  for (const auto& value : segment.values) {
    run.layouts.push_back(value->layout);
  }
  notes->run = std::move(run);
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
  for (const auto* signature : entries) {
    recent.add(*signature);
  }
  recent.launched();
  ++counters.segments_run;
  ++counters.memory_hits;
  ++counters.replays;
  if (notes != nullptr && notes->num_cuts++ == 0) { // a replay by another thread than that which records: a program of its own
    notes->first_cut = user_place();
  }
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
    launch->variant->spare = std::move(launch->spare);
    programs_.remember(launch->token, launch->outputs.empty() ? ValuePtr() : launch->outputs.front());
    launch->variant->last_launch = programs_.num_launched();
    for (const auto& value : launch->outputs) {
      value->launch = programs_.num_launched();
    }
    if (launch->offenders != nullptr) {
      unchecked_.push_back({programs_.num_launched(), launch->offenders, launch->variant->demands, std::move(launch->checked)});
    }
  }
  launches.clear();
  if (error != nullptr) {
    throw_torch_error(*error);
  }
  check_launches();
}

} // namespace tpu
