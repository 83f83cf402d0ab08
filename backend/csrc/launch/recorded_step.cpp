#include "launch/recorded_step.h"

#include "device/device.h"
#include "python_error.h"
#include "record/settings.h"

#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <unordered_map>
#include <unordered_set>

namespace py = pybind11;

namespace tpu {
namespace {

constexpr auto kOneFunction =
    "what changes must be an argument; calls that take turns (to accumulate gradients, say) belong in one function";

bool is_number(const py::handle& object) {
  return (PyFloat_Check(object.ptr()) || PyLong_Check(object.ptr())) && !PyBool_Check(object.ptr());
}

} // namespace

Guards Guards::now() {
  return {
      .thread = std::this_thread::get_id(),
      .mode = tpu::mode(),
      .grad_mode = c10::GradMode::is_enabled(),
      .inference_mode = c10::InferenceMode::is_enabled(),
      .autocast = at::autocast::is_autocast_enabled(kDeviceType),
      .autocast_dtype = at::autocast::get_autocast_dtype(kDeviceType),
      .deterministic = at::globalContext().deterministicAlgorithms(),
      .precision = static_cast<int>(matmul_precision()),
      .default_dtype = at::get_default_dtype_as_scalartype()};
}

py::tuple Guards::key() const {
  return py::make_tuple(
      static_cast<int>(mode),
      grad_mode,
      inference_mode,
      autocast ? static_cast<int>(autocast_dtype) : -1,
      deterministic,
      precision,
      static_cast<int>(default_dtype));
}

bool Guards::operator==(const Guards& other) const {
  // Each thread has an autocast dtype of its own, whether it uses it or not.
  const bool same_dtype = autocast_dtype == other.autocast_dtype || (!autocast && thread != other.thread);
  return same_dtype && mode == other.mode && grad_mode == other.grad_mode && inference_mode == other.inference_mode &&
      autocast == other.autocast && deterministic == other.deterministic && precision == other.precision &&
      default_dtype == other.default_dtype;
}

RecordedStep::Geometry RecordedStep::Geometry::of(const at::Tensor& tensor) {
  return {
      c10::DimVector(tensor.sizes()), c10::DimVector(tensor.strides()), tensor.storage_offset(), tensor.scalar_type()};
}

// ---- recording ----

RecordedStep::RecordedStep(c10::DeviceIndex device)
    : device_(device), guards_(Guards::now()), first_new_address_(next_address()) {
  auto& stream = Device::get().stream(device_);
  StreamLock lock(stream.mutex());
  const auto check_alone = [&] {
    TORCH_CHECK(
        dynamic_cast<const CaptureSink*>(stream.sink().get()) == nullptr,
        "torch.tpu.capture: another thread is recording a step: let the first calls of one come before the other's");
  };
  check_alone();
  stream.cut_all();
  check_alone();
  if (stream.sink() == stream.run_sink()) { // a rehearsal records no step
    stream.set_sink(record_);
  }
  stream.sink()->on_captured_step(/*begins=*/true);
  is_recording_ = true;
}

RecordedStep::~RecordedStep() {
  abandon();
}

void RecordedStep::abandon() {
  if (!std::exchange(is_recording_, false)) {
    return; // the garbage collector may come here on any thread: it takes no lock
  }
  auto& stream = Device::get().stream(device_);
  StreamLock lock(stream.mutex());
  stream.sink()->on_captured_step(/*begins=*/false);
  if (stream.sink() == record_) {
    stream.set_sink(stream.run_sink());
  }
}

std::optional<Problem> RecordedStep::finish(const py::list& arguments, const std::vector<at::Tensor>& results) {
  auto& stream = Device::get().stream(device_);
  StreamLock lock(stream.mutex());
  const auto seen = seen_buffers();
  if (stream.sink() != record_) {
    stream.cut();
    return Problem{"it is called in torch.tpu.rehearsal, which runs nothing"};
  }
  stream.cut(stream.run_sink());
  is_recording_ = false;
  if (record_->first_read.has_value()) {
    return Problem{
        "it reads a tensor to the host (item(), print, an operator that runs on the CPU)",
        "return what is read, and read it outside",
        -1,
        *record_->first_read};
  }
  if (record_->is_full) {
    return Problem{
        "it is more than " + std::to_string(kMaxEntries) + " operations",
        "capture a part of it, or compile the model, which makes its operations one"};
  }
  if (record_->num_cuts > 1) {
    return Problem{"it is more than one program: it waits or flushes", "do that outside", -1, record_->first_cut};
  }
  if (!record_->run.has_value() || record_->run->specialization == nullptr) {
    return Problem{"it computes nothing that is kept"};
  }
  run_ = std::move(*record_->run);
  return resolve(arguments, results, seen);
}

std::vector<RecordedStep::Seen> RecordedStep::seen_buffers() const {
  std::vector<Seen> seen;
  for_each_live_buffer(device_, [&](Buffer& buffer) {
    if (buffer.value) {
      seen.push_back({handle_of(buffer), buffer.address, buffer.value->segment, buffer.value->local});
    }
  });
  return seen;
}

std::optional<Problem> RecordedStep::resolve(
    const py::list& arguments, const std::vector<at::Tensor>& results, const std::vector<Seen>& seen_buffers) {
  std::unordered_map<uintptr_t, size_t> argument_at;
  for (const auto& handle : arguments) {
    Argument argument;
    argument.type = shared_reference(Py_NewRef(reinterpret_cast<PyObject*>(Py_TYPE(handle.ptr()))));
    if (THPVariable_Check(handle.ptr())) {
      const at::Tensor& tensor = THPVariable_Unpack(handle.ptr());
      const Buffer* buffer = buffer_of(tensor);
      argument.geometry = Geometry::of(tensor);
      argument.geometry.offset = 0; // a number, see take_arguments
      argument.layout = buffer->layout;
      argument.requires_grad = tensor.requires_grad();
      argument.alias = argument_at.emplace(buffer->address, arguments_.size()).first->second;
    } else if (is_number(handle)) {
      argument.is_number = true;
    } else {
      argument.value = shared_reference(Py_NewRef(handle.ptr()));
    }
    arguments_.push_back(std::move(argument));
  }

  std::unordered_map<uintptr_t, size_t> storage_at;
  std::unordered_map<uintptr_t, size_t> num_returned;
  for (const auto& tensor : results) {
    const uintptr_t address = buffer_of(tensor)->address;
    const size_t storage = storage_at.emplace(address, storage_at.size()).first->second;
    results_.push_back({Geometry::of(tensor), storage});
    ++num_returned[address];
  }
  num_storages_ = storage_at.size();

  std::unordered_map<int32_t, size_t> input_of;
  for (size_t input = 0; input < run_.inputs.size(); ++input) {
    input_of[run_.inputs[input]] = input;
  }
  std::unordered_map<int32_t, size_t> output_of;
  const auto& outputs = run_.specialization->outputs;
  for (size_t output = 0; output < outputs.size(); ++output) {
    output_of[outputs[output]] = output;
  }
  std::unordered_map<uintptr_t, std::unordered_set<int32_t>> read_from;
  for (const auto& [local, address] : record_->reads) {
    read_from[address].insert(local);
  }
  const std::unordered_set<uintptr_t> written(record_->written.begin(), record_->written.end());
  std::unordered_set<size_t> found_storages;
  bool is_strange = false;
  for (const auto& buffer : seen_buffers) {
    if (buffer.buffer->buffer.load() == nullptr) {
      continue;
    }
    const bool is_new = buffer.address >= first_new_address_;
    const auto found = argument_at.find(buffer.address);
    const int64_t argument = found == argument_at.end() ? -1 : static_cast<int64_t>(found->second);
    if (const auto read = read_from.find(buffer.address); read != read_from.end() && !is_new) {
      for (int32_t local : read->second) {
        sources_.push_back({input_of.at(local), argument, buffer.buffer});
      }
    }
    const bool is_input = buffer.segment == run_.serial && run_.is_input[buffer.local] != 0;
    const auto output = buffer.segment == run_.serial ? output_of.find(buffer.local) : output_of.end();
    if (output == output_of.end()) {
      // What the step computed and is no longer there was replaced by another thread.
      const bool is_gone = buffer.segment == run_.serial && !is_input;
      is_strange |= written.count(buffer.address) != 0 || (is_input && is_new) || is_gone;
      continue;
    }
    const auto result = storage_at.find(buffer.address);
    const int64_t storage = result == storage_at.end() || !is_new ? -1 : static_cast<int64_t>(result->second);
    if (storage >= 0) {
      found_storages.insert(result->second);
    }
    targets_.push_back({output->second, argument, storage, buffer.buffer, is_new});
  }
  if (is_strange) {
    return Problem{
        "it keeps a tensor that it did not compute: one from the host, or a copy of one that was there before",
        "make it once, before the first call, or an argument"};
  }
  if (found_storages.size() != num_storages_) {
    return Problem{
        "it returns a tensor that was there before (an argument, a parameter, a sum), a copy of one, or one from the "
        "host",
        "read that one outside"};
  }
  for (const auto& tensor : results) {
    if (tensor.storage().use_count() > num_returned[buffer_of(tensor)->address]) {
      return Problem{
          "it returns a tensor that it also keeps (in an attribute, a list, a .grad), where a replay would "
          "not update it",
          "keep a copy, detach().clone(), or have the caller keep what is returned"};
    }
  }
  if (targets_.empty()) {
    return Problem{"it computes nothing that is kept"};
  }
  std::sort(sources_.begin(), sources_.end(), [](const auto& a, const auto& b) { return a.key() < b.key(); });
  std::sort(targets_.begin(), targets_.end(), [](const auto& a, const auto& b) { return a.key() < b.key(); });
  size_t next = 0;
  for (const auto& source : sources_) {
    next += source.input == next ? 1 : 0;
  }
  if (next != run_.inputs.size()) {
    return Problem{
        "it reads a tensor that it made on the host itself, or that is gone",
        "make it once, before the first call, or an argument; gradients stay with zero_grad(set_to_none=False)",
        record_->readers[next]};
  }

  const auto& donated = run_.specialization->donated;
  for (int32_t local : run_.inputs) {
    is_donated_.push_back(static_cast<uint8_t>(std::binary_search(donated.begin(), donated.end(), local)));
  }
  return std::nullopt;
}

std::optional<Problem> RecordedStep::difference(const RecordedStep& other) const {
  const auto are_alike = [](const auto& some, const auto& others) {
    return std::equal(some.begin(), some.end(), others.begin(), others.end(), [](const auto& a, const auto& b) {
      return a.key() == b.key();
    });
  };
  if (run_.specialization != other.run_.specialization) {
    const auto& entries = run_.entries;
    const auto [one, another] =
        std::mismatch(entries.begin(), entries.end(), other.run_.entries.begin(), other.run_.entries.end());
    if (one != entries.end() && another != other.run_.entries.end()) {
      // That of the two which was met first: of calls that take turns the same one each time.
      return Problem{
          "it computes something else than in the call before", kOneFunction, std::min((*one)->id, (*another)->id)};
    }
    return Problem{"it keeps other results, or computes more or less, than in the call before", kOneFunction};
  }
  if (!are_alike(sources_, other.sources_)) {
    return Problem{"it reads other tensors than before", kOneFunction};
  }
  if (!are_alike(targets_, other.targets_)) {
    return Problem{"it writes other tensors than before", kOneFunction};
  }
  if (results_ != other.results_) {
    return Problem{"what it returns has another shape"};
  }
  const auto same_draw = [](const Draw& a, const Draw& b) {
    return a.place == b.place && a.count == b.count && a.generator == b.generator;
  };
  if (!std::equal(run_.draws.begin(), run_.draws.end(), other.run_.draws.begin(), other.run_.draws.end(), same_draw)) {
    return Problem{"it draws from another generator"};
  }
  return std::nullopt;
}

std::vector<bool> RecordedStep::uses(const std::vector<at::Tensor>& tensors) const {
  std::unordered_set<const Buffer*> used;
  for (const auto& source : sources_) {
    used.insert(source.buffer->buffer.load());
  }
  for (const auto& target : targets_) {
    used.insert(target.buffer->buffer.load());
  }
  std::vector<bool> found;
  for (const auto& tensor : tensors) {
    found.push_back(used.count(buffer_of(tensor)) != 0);
  }
  return found;
}

void RecordedStep::make_replayable(
    Watches watches, std::vector<double> numbers, std::vector<uint8_t> may_change, std::vector<Binding> bindings) {
  watches_ = std::move(watches);
  recorded_numbers_ = std::move(numbers);
  may_change_ = std::move(may_change);
  bindings_ = std::move(bindings);
  std::vector<uintptr_t> written;
  for (const auto& target : targets_) {
    if (const Buffer* buffer = target.buffer->buffer.load(); buffer != nullptr && target.storage < 0) {
      written.push_back(buffer->address);
    }
  }
  std::sort(written.begin(), written.end());
  for (auto& tensor : watches_->tensors_on(written)) {
    if (!tensor.is_inference()) {
      versioned_.push_back(std::move(tensor));
    }
  }
}

// ---- replaying ----

py::object RecordedStep::replay(const py::sequence& arguments) {
  TORCH_INTERNAL_ASSERT(watches_.has_value(), "a step that was recorded once is not replayed");
  if (!(Guards::now() == guards_)) {
    return py::str(
        "a mode changed: gradients, autocast, precision, determinism, torch's default dtype or the eager mode");
  }
  if (const int changed = watches_->first_changed(); changed >= 0) {
    return py::int_(changed);
  }
  std::vector<double> numbers;
  if (!watches_->read_numbers(numbers)) {
    return py::str("a setting of an optimizer or a tensor on the CPU is no longer a number, or more than 53 bits");
  }
  Taken taken;
  if (auto reason = take_arguments(arguments, taken, numbers)) {
    return py::str(*reason);
  }
  auto& stream = Device::get().stream(device_);
  StreamLock lock(stream.mutex());
  if (const auto reason = stream.sink()->why_no_replay()) {
    return py::str(*reason);
  }
  stream.cut_all();
  stream.get_ready_to_launch(
      run_.inputs.size()); // what became of earlier launches is raised before anything is changed
  if (auto reason = take_inputs(taken)) {
    return py::str(*reason);
  }
  if (stream.has_queued() && donates_shared(taken)) { // with a launch in the queue, perhaps: then not for long
    stream.settle();
  }
  if (auto reason = set_numbers(numbers)) {
    return py::str(*reason);
  }
  draw();
  return launch(stream, taken);
}

std::optional<std::string>
RecordedStep::take_arguments(const py::sequence& arguments, Taken& taken, std::vector<double>& numbers) const {
  if (arguments.size() != arguments_.size()) {
    return "it has another number of arguments";
  }
  taken.arguments.reserve(arguments_.size());
  for (size_t i = 0; i < arguments_.size(); ++i) {
    const Argument& expected = arguments_[i];
    const py::handle given = PySequence_Fast_GET_ITEM(arguments.ptr(), static_cast<Py_ssize_t>(i));
    Buffer* buffer = nullptr;
    if (reinterpret_cast<PyObject*>(Py_TYPE(given.ptr())) != expected.type.get()) {
      return "an argument is of another type";
    }
    if (expected.layout != nullptr) {
      const at::Tensor& tensor = THPVariable_Unpack(given.ptr());
      if (tensor.device() != c10::Device(kDeviceType, device_) || tensor.layout() != at::kStrided) {
        return "an argument is on another device";
      }
      buffer = buffer_of(tensor);
      auto geometry = Geometry::of(tensor);
      numbers.push_back(static_cast<double>(std::exchange(geometry.offset, 0))); // a batch may be a slice of all data
      if (!(geometry == expected.geometry) || buffer->layout != expected.layout) {
        return "an argument has another shape, dtype or memory layout";
      }
      if (tensor.requires_grad() != expected.requires_grad || tensor.is_conj() || tensor.is_neg()) {
        return "an argument requires a gradient, or no longer does";
      }
      size_t alias = 0;
      while (alias < i && taken.arguments[alias] != buffer) {
        ++alias;
      }
      if (alias != expected.alias) {
        return "other arguments than before share memory";
      }
    } else if (expected.is_number) {
      numbers.push_back(PyFloat_AsDouble(given.ptr()));
      if (PyErr_Occurred() != nullptr) {
        throw py::error_already_set();
      }
      if (PyLong_Check(given.ptr()) && std::abs(numbers.back()) >= kInexact) {
        return "an argument is an integer of more than 53 bits";
      }
    } else if (!is_same(expected.value.get(), given.ptr())) {
      return "an argument has another value";
    }
    taken.arguments.push_back(buffer);
  }
  return std::nullopt;
}

std::optional<std::string> RecordedStep::take_inputs(Taken& taken) const {
  if (!run_.specialization->is_loaded()) {
    return "this process has joined other ranks since, and its earlier programs are gone";
  }
  taken.inputs.reserve(run_.inputs.size());
  const auto is_argument = [&](const Buffer* buffer) {
    return std::find(taken.arguments.begin(), taken.arguments.end(), buffer) != taken.arguments.end();
  };
  for (const auto& source : sources_) {
    Buffer* buffer = source.argument >= 0 ? taken.arguments[source.argument] : source.buffer->buffer.load();
    if (buffer == nullptr) {
      return "a tensor that it used is gone";
    }
    if (source.argument < 0 && is_argument(buffer)) {
      return "an argument shares memory with what the step itself uses";
    }
    if (!buffer->value || buffer->value->layout != run_.layouts[run_.inputs[source.input]]) {
      return "a tensor that it uses has another layout";
    }
    const Value& value = *buffer->value;
    TORCH_CHECK(value.in_flight || value.error == nullptr, kNoValue, *value.error);
    TORCH_CHECK(value.in_flight || value.array != nullptr, kBeingCompiled);
    if (source.input < taken.inputs.size()) { // one more that held the same value
      if (taken.inputs[source.input]->value != buffer->value) {
        return "tensors that were equal no longer are";
      }
      continue;
    }
    taken.inputs.push_back(buffer);
  }
  for (const auto& target : targets_) {
    if (target.argument >= 0 || target.storage >= 0) {
      continue;
    }
    const Buffer* buffer = target.buffer->buffer.load();
    if (buffer == nullptr) {
      return "a tensor that it left behind is gone (a gradient? call zero_grad() inside, or with set_to_none=False)";
    }
    if (is_argument(buffer)) {
      return "an argument shares memory with what the step itself writes";
    }
  }
  return std::nullopt;
}

std::optional<std::string> RecordedStep::set_numbers(const std::vector<double>& numbers) {
  for (size_t i = 0; i < numbers.size(); ++i) {
    // By their bits: 0.0 and -0.0 are two numbers, and NaN is one.
    if (may_change_[i] == 0 && std::bit_cast<uint64_t>(numbers[i]) != std::bit_cast<uint64_t>(recorded_numbers_[i])) {
      return "a number changed for the first time";
    }
  }
  for (const auto& binding : bindings_) {
    const auto value_of = [&](const std::pair<size_t, bool>& source) {
      return source.second ? -numbers[source.first] : numbers[source.first];
    };
    const double value = value_of(binding.sources.front());
    for (const auto& source : binding.sources) {
      if (std::bit_cast<uint64_t>(value_of(source)) != std::bit_cast<uint64_t>(value)) {
        return "numbers that changed together no longer do";
      }
    }
    switch (binding.kind) {
    case Binding::Kind::Float:
      run_.numbers.floats[binding.place] = static_cast<float>(value);
      break;
    case Binding::Kind::Double:
      run_.numbers.doubles[binding.place] = value;
      break;
    case Binding::Kind::Integer:
      run_.numbers.integers[binding.place] = static_cast<int64_t>(value);
      break;
    }
  }
  return std::nullopt;
}

void RecordedStep::draw() {
  for (const auto& each : run_.draws) {
    auto& generator = *each.generator.get<GeneratorImpl>();
    std::lock_guard<std::mutex> guard(generator.mutex_);
    run_.numbers.integers[each.place] = static_cast<int64_t>(generator.current_seed());
    run_.numbers.integers[each.place + 1] = static_cast<int64_t>(generator.take_offsets(each.count));
  }
}

// Whether anybody but the buffer it is in, and the launch that computes it, holds it.
bool RecordedStep::is_shared(const ValuePtr& value) {
  return value.use_count() > (value->in_flight ? 2 : 1);
}

bool RecordedStep::donates_shared(const Taken& taken) const {
  for (size_t i = 0; i < taken.inputs.size(); ++i) {
    if (is_donated_[i] != 0 && is_shared(taken.inputs[i]->value)) {
      return true;
    }
  }
  return false;
}

Buffer* RecordedStep::buffer_for(const Target& target, const Taken& taken) const {
  return target.argument >= 0 ? taken.arguments[target.argument] : target.buffer->buffer.load();
}

py::object RecordedStep::launch(Stream& stream, const Taken& taken) {
  auto launch = std::make_unique<Launch>();
  launch->specialization = run_.specialization;
  launch->numbers = run_.numbers;
  launch->checked = run_.checked;
  launch->inputs.reserve(taken.inputs.size());
  for (size_t i = 0; i < taken.inputs.size(); ++i) {
    const ValuePtr& value = taken.inputs[i]->value;
    const bool is_value_shared = is_shared(value);
    launch->inputs.push_back({value, is_donated_[i] != 0, is_value_shared});
  }
  std::vector<ValuePtr> values;
  values.reserve(run_.specialization->outputs.size());
  auto& spare = run_.specialization->spare;
  for (const auto& value : spare) { // another thread has written them
    __builtin_prefetch(value.get(), 1);
  }
  for (int32_t local : run_.specialization->outputs) {
    const bool has_spare = values.size() < spare.size() && spare[values.size()].defined();
    values.push_back(has_spare ? std::move(spare[values.size()]) : c10::make_intrusive<Value>(run_.layouts[local]));
  }
  launch->outputs = values;
  const bool is_queued = stream.launch_again(std::move(launch), run_.entries);

  std::vector<c10::Storage> storages(num_storages_);
  for (const auto& target : targets_) {
    const ValuePtr& value = values[target.output];
    Buffer* buffer = nullptr;
    if (target.storage >= 0) {
      storages[target.storage] = make_storage(value->layout, device_);
      buffer = static_cast<Buffer*>(storages[target.storage].data_ptr().get_context());
    } else {
      buffer = buffer_for(target, taken);
    }
    if (buffer != nullptr) {
      stream.assign(buffer, value);
    }
  }
  for (const auto& tensor : versioned_) {
    tensor.unsafeGetTensorImpl()->bump_version();
  }
  values.clear();
  if (!is_queued) {
    stream.take_launches();
  }
  py::list results;
  for (const auto& [geometry, storage] : results_) {
    results.append(tensor_in(storages[storage], geometry.dtype, geometry.sizes, geometry.strides, geometry.offset));
  }
  return results;
}

} // namespace tpu
