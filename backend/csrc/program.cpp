#include "program.h"

#include "launcher.h"
#include "parts.h"
#include "python_error.h"
#include "stream.h"

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <set>
#include <unordered_set>

namespace py = pybind11;

namespace tpu {
namespace {

// A synchronisation waits for this many launches; the device works them off in order.
constexpr size_t kRememberedLaunches = 64;

// Programs that are loaded before it is looked again whether there is room for more.
constexpr size_t kLoadedBetweenLooks = 8;

// Of one program: sets of results that were kept, each with an executable that returns no others.
constexpr size_t kMostSetsOfResults = 4;

py::handle check(PyObject* object) {
  if (object == nullptr) {
    throw py::error_already_set();
  }
  return object;
}

// Runtime numbers travel packed, one array a dtype; the array of the last call is used again when nothing changed.
template <class T>
PyObject* packed(const std::vector<T>& numbers, std::string& last, PyObject*& array) {
  const std::string_view bytes(reinterpret_cast<const char*>(numbers.data()), numbers.size() * sizeof(T));
  if (array != nullptr && bytes == last) {
    return array;
  }
  py::array_t<T> host(static_cast<py::ssize_t>(numbers.size()));
  std::memcpy(host.mutable_data(), numbers.data(), bytes.size());
  PyObject* fresh = PyObject_CallOneArg(runtime().put_numbers, host.ptr());
  check(fresh);
  Py_XDECREF(array);
  array = fresh;
  last.assign(bytes);
  return array;
}

// Whether a variant takes the memory of just those inputs that this segment's results take the place of.  The tape does not
// say that of a result that is written without a look at what was there (`fill_`, `out=`).
bool donates_alike(const Variant& variant, const Segment& segment) {
  const auto num_donated = variant.donated.size();
  for (size_t i = 0; i < variant.outputs.size(); ++i) {
    const int32_t local = variant.outputs[i];
    const int32_t origin = segment.origin[local];
    if (i < num_donated) {
      if (origin != variant.donated[i]) {
        return false;
      }
    } else if (
        origin >= 0 && segment.is_input[origin] != 0 && segment.values[origin]->layout == segment.values[local]->layout &&
        !std::binary_search(variant.donated.begin(), variant.donated.end(), origin)) {
      return false;
    }
  }
  return true;
}

// One that returns what is wanted at least.
Variant* fitting_variant(const Program& program, const Segment& segment, const Locals& live) {
  const auto offsets_match = [&](const Variant& variant) {
    for (size_t i = 0; i < segment.offsets.size(); ++i) {
      if (variant.offset_is_input[i] == 0 && variant.offsets[i] != segment.offsets[i]) {
        return false;
      }
    }
    return true;
  };
  // An executable that returns more than is wanted will do: a kept metric or a late `del` compiles nothing.
  const auto returns_live = [&](const Variant& variant) {
    const auto& outputs = variant.sorted_outputs;
    return std::includes(outputs.begin(), outputs.end(), live.begin(), live.end());
  };
  const auto is_better = [](const Variant& variant, const Variant& other) {
    return variant.is_loaded() != other.is_loaded() ? variant.is_loaded() : variant.outputs.size() < other.outputs.size();
  };
  // A padded program, whose last digits may be others, serves only where padding is allowed now.
  const bool takes_padded = may_be_padded(segment);
  Variant* best = nullptr;
  for (auto& variant : program.variants) {
    if (variant->is_padded && !takes_padded) {
      continue;
    }
    if (offsets_match(*variant) && returns_live(*variant) && donates_alike(*variant, segment) &&
        (best == nullptr || is_better(*variant, *best))) {
      best = variant.get();
    }
  }
  return best;
}

// (input, the output that takes its memory): a value that the segment replaced in its buffer gives it to the newest of those
// that did.  Whoever else holds the value changes nothing: a copy is donated then, see `argument_of`.
using Donations = std::vector<std::pair<int32_t, int32_t>>;

Donations donations_of(const Segment& segment, const std::vector<int32_t>& sorted_outputs) {
  Donations donations;
  for (int32_t local : sorted_outputs) {
    const int32_t origin = segment.origin[local];
    if (origin >= 0 && segment.is_input[origin] != 0 && segment.values[origin]->layout == segment.values[local]->layout) {
      donations.emplace_back(origin, local);
    }
  }
  std::sort(donations.begin(), donations.end());
  const auto is_same_input = [](const auto& some, const auto& other) { return some.first == other.first; };
  const auto kept = std::unique(donations.rbegin(), donations.rend(), is_same_input);
  donations.erase(donations.begin(), kept.base());
  return donations;
}

// The outputs of a new variant, ascending.  Where several sets of results were kept in turns, all that ever were are returned
// from then on: each program more returns one result more at least, so that they come to an end.
std::vector<int32_t> outputs_for(const Program& program, const Locals& live) {
  std::set<int32_t> outputs(live.begin(), live.end());
  std::set<std::vector<int32_t>> sets;
  for (const auto& variant : program.variants) {
    sets.insert(variant->sorted_outputs);
  }
  if (sets.size() >= kMostSetsOfResults) {
    for (const auto& set : sets) {
      outputs.insert(set.begin(), set.end());
    }
  }
  return {outputs.begin(), outputs.end()};
}

std::shared_ptr<Variant> new_variant(const Program& program, const Segment& segment, const Locals& live) {
  auto variant = std::make_shared<Variant>();
  variant->offsets = segment.offsets;
  variant->offset_is_input.assign(segment.offsets.size(), 0);
  // An offset that has been seen with two values becomes an input.
  for (const auto& other : program.variants) {
    for (size_t i = 0; i < segment.offsets.size(); ++i) {
      variant->offset_is_input[i] |=
          static_cast<uint8_t>(other->offset_is_input[i] != 0 || other->offsets[i] != segment.offsets[i]);
    }
  }
  variant->sorted_outputs = outputs_for(program, live);
  // Donated inputs and the outputs that take over their memory stand in the same order, so that XLA pairs them so.
  for (const auto& [input, output] : donations_of(segment, variant->sorted_outputs)) {
    variant->donated.push_back(input);
    variant->outputs.push_back(output);
  }
  for (int32_t local : variant->sorted_outputs) {
    if (std::find(variant->outputs.begin(), variant->outputs.end(), local) == variant->outputs.end()) {
      variant->outputs.push_back(local);
    }
  }
  return variant;
}

// What `compile` in tpu_backend/runtime/compiler.py is told.
py::dict describe(const Program& program, const Variant& variant, const Segment& segment) {
  py::dict description;
  description["tape"] = py::cast(segment.tape);
  description["circumstances"] = py::cast(segment.circumstances);
  py::list input_layouts;
  for (int32_t local : segment.inputs) {
    input_layouts.append(py::make_tuple(
        static_cast<int>(segment.values[local]->layout->dtype), py::cast(segment.values[local]->layout->dims)));
  }
  description["input_layouts"] = input_layouts;
  description["inputs"] = py::cast(segment.inputs);
  description["outputs"] = py::cast(variant.outputs);
  description["donated"] = py::cast(variant.donated);
  description["offsets"] = py::cast(segment.offsets);
  description["offset_is_input"] =
      py::cast(std::vector<bool>(variant.offset_is_input.begin(), variant.offset_is_input.end()));
  description["num_floats"] = segment.numbers.floats.size();
  description["num_doubles"] = segment.numbers.doubles.size();
  description["num_integers"] = segment.numbers.integers.size();
  description["was_given_back"] = variant.demands != nullptr;
  description["may_be_padded"] = may_be_padded(segment);
  description["was_layered"] = program.parts && program.parts->size() > 1;
  return description;
}

// The values that somebody can still see when the segment was run.
Locals live_values(const Segment& segment) {
  Locals live;
  for (size_t local = 0; local < segment.values.size(); ++local) {
    if (segment.is_input[local] == 0 && segment.values[local].use_count() > 1) {
      live.push_back(static_cast<int32_t>(local));
    }
  }
  return live;
}

} // namespace

PyObject* argument_of(const Value& value, bool is_donated, bool is_shared) {
  const bool is_exclusive = !is_shared && !value.leased && Py_REFCNT(value.array) == 1;
  if (!is_donated || is_exclusive) {
    return Py_NewRef(value.array);
  }
  return check(PyObject_CallOneArg(runtime().copy, value.array)).ptr();
}

Runtime& runtime() {
  static auto* instance = new Runtime;
  return *instance;
}

Program& ProgramCache::find(const Segment& segment) {
  auto& bucket = programs_[segment.hash];
  for (auto& program : bucket) {
    if (program->tape == segment.tape) {
      return *program;
    }
  }
  bucket.push_back(std::make_unique<Program>());
  bucket.back()->tape = segment.tape;
  return *bucket.back();
}

std::shared_ptr<Variant> ProgramCache::variant_for(
    Program& program, const Segment& segment, const Locals& live, Counters& counters) {
  if (Variant* fitting = fitting_variant(program, segment, live)) {
    auto known = fitting->shared_from_this();
    if (known->is_loaded()) {
      ++counters.memory_hits;
    } else {
      load(program, *known, segment, counters);
    }
    return known;
  }
  auto variant = new_variant(program, segment, live);
  load(program, *variant, segment, counters);
  program.variants.push_back(variant);
  return variant;
}

void ProgramCache::load(const Program& program, Variant& variant, const Segment& segment, Counters& counters) {
  make_room();
  const auto start = std::chrono::steady_clock::now();
  const auto description = describe(program, variant, segment);
  const auto executable = [&] {
    PyObject* const call[] = {description.ptr(), mutex_.is_outermost_turn() ? Py_True : Py_False};
    const StreamUnlocked unlocked(mutex_);
    return py::reinterpret_steal<py::object>(check(PyObject_Vectorcall(runtime().compile, call, 2, nullptr)));
  }();
  py::object execute = executable.attr("execute");
  py::object handlers = executable.attr("handlers");
  if (variant.demands == nullptr) {
    variant.demands = py::object(executable.attr("demands")).release().ptr();
    variant.has_offenders = py::len(py::handle(variant.demands)) > 0;
  }
  if (py::cast<bool>(executable.attr("is_shared"))) {
    ++counters.memory_hits;
    --num_loaded_; // it was loaded before
  } else if (py::cast<bool>(executable.attr("from_disk"))) {
    ++counters.disk_hits;
  } else {
    ++counters.compilations;
    counters.compile_seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  }
  if (variant.is_loaded()) { // by a turn inside this one
    return;
  }
  variant.is_padded = py::cast<bool>(executable.attr("is_padded"));
  variant.executable = Py_NewRef(executable.ptr());
  variant.execute = execute.release().ptr();
  variant.handlers = handlers.release().ptr();
  variant.last_launch = num_launched_;
}

void ProgramCache::make_room() {
  if (++num_loaded_ < kLoadedBetweenLooks) {
    return;
  }
  num_loaded_ = 0;
  const auto is_short = [] {
    return py::cast<bool>(py::reinterpret_steal<py::object>(check(PyObject_CallNoArgs(runtime().is_room_short))));
  };
  if (!is_short()) {
    return;
  }
  struct Candidate {
    Program* program;
    Variant* variant;
  };
  std::vector<Candidate> unused;
  for (const auto& [hash, bucket] : programs_) {
    for (const auto& program : bucket) {
      for (const auto& variant : program->variants) {
        if (variant->is_loaded() && variant.use_count() == 1 && variant->last_launch <= last_look_) {
          unused.push_back({program.get(), variant.get()});
        }
      }
    }
  }
  last_look_ = num_launched_;
  const auto middle = unused.begin() + static_cast<std::ptrdiff_t>((unused.size() + 1) / 2);
  std::nth_element(unused.begin(), middle, unused.end(), [](const Candidate& some, const Candidate& other) {
    return some.variant->last_launch < other.variant->last_launch;
  });
  std::vector<PyObject*> given_back; // released when nothing is half done: that runs Python
  std::for_each(unused.begin(), middle, [&](const Candidate& candidate) {
    candidate.program->is_prepared = false;
    for (PyObject** part : {&candidate.variant->executable, &candidate.variant->execute, &candidate.variant->handlers}) {
      given_back.push_back(std::exchange(*part, nullptr));
    }
  });
  for (PyObject* part : given_back) {
    Py_DECREF(part);
  }
  if (is_short()) {
    TORCH_WARN_ONCE(
        "the process has few memory mappings left, and programs of the device hold only a part of them: programs that were "
        "not used lately are compiled again when they are; raise vm.max_map_count");
  }
}

bool is_wanted(const Segment& segment) {
  return !segment.checked.empty() || !live_values(segment).empty();
}

bool ProgramCache::begins_layered(const Segment& segment, size_t most_layered_runs, Counters& counters) {
  Program& program = find(segment);
  if (program.is_rehearsed || !program.variants.empty()) {
    return false;
  }
  if (program.is_refused || program.num_layered < most_layered_runs) {
    return true;
  }
  const Locals live = live_values(segment);
  try {
    variant_for(program, segment, live, counters);
  } catch (const py::error_already_set& error) {
    if (is_interrupt(error)) {
      throw;
    }
    if (error.matches(PyExc_TimeoutError)) { // a thread still compiles it
      return true;
    }
    program.is_refused = true;
    const std::string message = error.what();
    TORCH_WARN(
        "steps that began layered stay so: the one program that should follow cannot be compiled (",
        message.substr(0, message.find('\n')),
        ")");
  }
  return program.is_refused;
}

const PartPlan* ProgramCache::parts_of(const Segment& segment) {
  Program& program = find(segment);
  if (!program.parts) {
    program.parts = std::make_shared<const PartPlan>(plan_parts(segment));
  }
  return program.parts.get();
}

void ProgramCache::rehearse(const Segment& segment) {
  prepare(segment, description_to_prepare(segment));
  find(segment).is_rehearsed = true;
}

py::object ProgramCache::description_to_prepare(const Segment& segment) {
  return find(segment).is_prepared ? py::object(py::none()) : description_of(segment, live_values(segment));
}

std::vector<py::object> ProgramCache::descriptions_of(const std::vector<Segment>& parts) {
  std::vector<py::object> descriptions;
  std::unordered_set<const Program*> seen;
  for (const auto& part : parts) {
    if (seen.insert(&find(part)).second) {
      descriptions.push_back(description_of(part, live_values(part)));
    }
  }
  return descriptions;
}

py::object ProgramCache::description_of(const Segment& segment, const Locals& live) {
  if (live.empty() && segment.checked.empty()) {
    return py::none();
  }
  const Program& program = find(segment);
  if (const Variant* known = fitting_variant(program, segment, live)) {
    return known->is_loaded() ? py::none() : py::object(describe(program, *known, segment));
  }
  return describe(program, *new_variant(program, segment, live), segment);
}

void ProgramCache::prepare(const Segment& segment, const py::object& description) {
  if (!description.is_none()) {
    py::list descriptions;
    descriptions.append(description);
    compile_ahead(descriptions, /*waits=*/false);
  }
  find(segment).is_prepared = true;
}

void ProgramCache::compile_all(const std::vector<Segment>& parts, Counters& counters) {
  const auto start = std::chrono::steady_clock::now();
  py::list descriptions;
  for (const auto& description : descriptions_of(parts)) {
    if (!description.is_none()) {
      descriptions.append(description);
    }
  }
  compile_ahead(descriptions, /*waits=*/true);
  counters.compile_seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

void ProgramCache::compile_ahead(const py::list& descriptions, bool waits) {
  if (descriptions.empty()) {
    return;
  }
  for (size_t i = 0; i < descriptions.size(); ++i) {
    make_room(); // counts the programs: each will be loaded
  }
  PyObject* const call[] = {descriptions.ptr(), waits ? Py_True : Py_False};
  const StreamUnlocked unlocked(mutex_);
  check(PyObject_Vectorcall(runtime().compile_ahead, call, 2, nullptr)).dec_ref();
}

ProgramCache::Started ProgramCache::start(Variant& variant, PyObject* arguments, const RuntimeNumbers& numbers) {
  const auto add = [&](PyObject* array) {
    if (PyList_Append(arguments, array) != 0) {
      throw py::error_already_set();
    }
  };
  {
    const WithoutCollector without_collector;
    if (!numbers.floats.empty()) {
      add(packed(numbers.floats, variant.last_floats, variant.float_array));
    }
    if (!numbers.doubles.empty()) {
      add(packed(numbers.doubles, variant.last_doubles, variant.double_array));
    }
    if (!numbers.integers.empty()) {
      add(packed(numbers.integers, variant.last_integers, variant.integer_array));
    }
  }
  static PyObject* const consume = PyUnicode_InternFromString("consume_with_handlers");
  static PyObject* const consume_token = PyUnicode_InternFromString("consume_token");
  static PyObject* const keywords = py::make_tuple("with_tokens").release().ptr();
  PyObject* const call[] = {arguments, Py_True};
  auto results = py::reinterpret_steal<py::object>(check(PyObject_Vectorcall(variant.execute, call, 1, keywords)));
  const WithoutCollector without_collector;
  auto arrays =
      py::reinterpret_steal<py::object>(check(PyObject_CallMethodOneArg(results.ptr(), consume, variant.handlers)));
  return {
      std::move(arrays), shared_reference(check(PyObject_CallMethodNoArgs(results.ptr(), consume_token)).ptr())};
}

void ProgramCache::remember(std::shared_ptr<PyObject> token, const ValuePtr& first) {
  Launched launched{std::move(token), c10::weak_intrusive_ptr<Value>(first)};
  if (first) {
    first->is_remembered = true;
  }
  if (launched_.size() < kRememberedLaunches) {
    launched_.push_back(std::move(launched));
  } else {
    launched_[num_launched_ % kRememberedLaunches] = std::move(launched);
  }
  ++num_launched_;
}

void ProgramCache::execute(Variant& variant, Segment& segment) {
  for (size_t i = 0; i < segment.offsets.size(); ++i) {
    if (variant.offset_is_input[i] != 0) {
      segment.numbers.integers.push_back(segment.offsets[i]);
    }
  }
  py::list arguments(segment.inputs.size());
  Py_ssize_t place = 0;
  size_t num_donated = 0;
  for (int32_t local : segment.inputs) { // ascending, as the donated ones are
    const ValuePtr& value = segment.values[local];
    const bool is_donated = num_donated < variant.donated.size() && variant.donated[num_donated] == local;
    num_donated += is_donated ? 1 : 0;
    PyList_SET_ITEM(arguments.ptr(), place++, argument_of(*value, is_donated, /*is_shared=*/value.use_count() > 1));
  }
  auto [arrays, token] = start(variant, arguments.ptr(), segment.numbers);
  for (size_t i = 0; i < variant.outputs.size(); ++i) {
    Value& value = *segment.values[variant.outputs[i]];
    PyObject* array = check(PyList_GetItem(arrays.ptr(), static_cast<Py_ssize_t>(i))).ptr();
    Py_INCREF(array);
    value.array = array;
    value.launch = num_launched_ + 1;
  }
  variant.last_launch = num_launched_;
  remember(std::move(token), variant.outputs.empty() ? ValuePtr() : segment.values[variant.outputs[0]]);
  if (variant.has_offenders) {
    segment.offenders = Py_NewRef(check(PyList_GetItem(arrays.ptr(), static_cast<Py_ssize_t>(variant.outputs.size()))).ptr());
  }
}

std::vector<Launched> ProgramCache::launched(size_t count) const {
  std::vector<Launched> launches;
  for (size_t launch = num_launched_ - launched_.size(); launch < std::min(count, num_launched_); ++launch) {
    launches.push_back(launched_[launch % kRememberedLaunches]);
  }
  return launches;
}

std::shared_ptr<PyObject> ProgramCache::token_of(size_t launch) const {
  const bool is_remembered = launch > num_launched_ - launched_.size();
  return is_remembered ? launched_[(launch - 1) % kRememberedLaunches].token : nullptr;
}

void ProgramCache::run(Segment& segment, Counters& counters) {
  const Locals live = live_values(segment);
  if (live.empty() && segment.checked.empty()) {
    return; // nobody can see what was recorded
  }
  for (int32_t local : segment.inputs) {
    const Value& value = *segment.values[local];
    if (const auto error = value.error; error != nullptr) { // it was in flight when this was recorded
      segment.fail(*error);
      TORCH_CHECK(false, kNoValue, *error);
    }
    TORCH_INTERNAL_ASSERT(value.array != nullptr, "a segment is run before the one whose values it reads");
  }
  const auto num_integers = segment.numbers.integers.size();
  try {
    Program& program = find(segment);
    const auto variant = variant_for(program, segment, live, counters);
    execute(*variant, segment);
    segment.variant = variant.get();
    ++counters.segments_run;
  } catch (py::error_already_set& error) {
    if (is_interrupt(error)) {
      segment.numbers.integers.resize(num_integers); // as it was: it may be run again
      throw;
    }
    const std::string message = error.what();
    segment.fail(message);
    throw_torch_error(message);
  }
}

} // namespace tpu
