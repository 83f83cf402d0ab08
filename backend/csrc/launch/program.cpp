#include "launch/program.h"

#include "launch/launcher.h"
#include "python_error.h"
#include "record/stream.h"

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>

namespace py = pybind11;

namespace tpu {
namespace {

// A synchronisation waits for this many launches; the device works them off in order.
constexpr size_t kRememberedLaunches = 64;

// Of a link that an interrupt keeps from being launched.
constexpr size_t kMostTries = 3;

// Programs that are loaded before it is looked again whether there is room for more.
constexpr size_t kLoadedBetweenLooks = 8;

// Runtime numbers travel packed, one array a dtype; the array of the last call is used again when nothing changed.
template <class T>
PyObject*
packed(const std::vector<T>& numbers, c10::DeviceIndex device, std::string& last, std::shared_ptr<PyObject>& array) {
  const std::string_view bytes(reinterpret_cast<const char*>(numbers.data()), numbers.size() * sizeof(T));
  if (array != nullptr && bytes == last) {
    return array.get();
  }
  std::string sent(bytes); // a finalizer in between may launch the same program
  py::array_t<T> host(static_cast<py::ssize_t>(numbers.size()));
  std::memcpy(host.mutable_data(), numbers.data(), bytes.size());
  PyObject* fresh = PyObject_CallFunction(runtime().put_numbers, "Oi", host.ptr(), static_cast<int>(device));
  array = shared_reference(check(fresh).ptr());
  last = std::move(sent);
  return array.get();
}

std::shared_ptr<PyObject> attribute(const py::handle& object, const char* name) {
  return shared_reference(py::object(object.attr(name)).release().ptr());
}

// A `Link` of tpu_backend/runtime/chain.py.
Link link_of(const py::handle& given, c10::DeviceIndex device) {
  const py::object executable = given.attr("executable");
  Link link;
  link.device = device;
  link.execute = attribute(executable, "execute");
  link.handlers = attribute(executable, "handlers");
  link.bounds_checks = attribute(executable, "bounds_checks");
  link.has_bounds_checks = py::len(py::handle(link.bounds_checks.get())) > 0;
  link.executable = shared_reference(Py_NewRef(executable.ptr()));
  const auto take = [&](const char* name, auto& places) {
    places = given.attr(name).cast<std::decay_t<decltype(places)>>();
  };
  take("inputs", link.inputs);
  take("is_donated", link.is_donated);
  take("outputs", link.outputs);
  take("dropped", link.dropped);
  take("floats", link.floats);
  take("doubles", link.doubles);
  take("integers", link.integers);
  take("offsets", link.offsets);
  take("checked", link.checked);
  return link;
}

} // namespace

RuntimeNumbers Link::numbers_of(const Segment& segment) const {
  RuntimeNumbers numbers;
  const auto take = [](auto& taken, const auto& all, const std::vector<uint32_t>& places) {
    for (const uint32_t place : places) {
      taken.push_back(all[place]);
    }
  };
  take(numbers.floats, segment.numbers.floats, floats);
  take(numbers.doubles, segment.numbers.doubles, doubles);
  take(numbers.integers, segment.numbers.integers, integers);
  take(numbers.integers, segment.offsets, offsets);
  return numbers;
}

std::vector<CheckedEntry> Link::checked_of(const Segment& segment) const {
  std::vector<CheckedEntry> entries;
  for (const auto& [place, entry] : checked) {
    entries.push_back(segment.checked[place]);
    entries.back().entry = entry;
  }
  return entries;
}

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

void ProgramCache::load(
    const Program& program, Specialization& specialization, const Segment& segment, Form form, Counters& counters) {
  const auto& plan = is_without_gradients(segment) ? program.plan_without_gradients : program.plan;
  make_room(form == Form::Parts && plan ? plan->num_parts : 1);
  const auto start = std::chrono::steady_clock::now();
  auto description = describe(program, specialization, segment, device_);
  description["may_time_out"] = form == Form::WholeInTime;
  const auto loaded = [&] {
    PyObject* const call[] = {description.ptr(), mutex_.is_outermost_turn() ? Py_True : Py_False};
    const StreamUnlocked unlocked(mutex_);
    return py::reinterpret_steal<py::object>(check(PyObject_Vectorcall(runtime().compile, call, 2, nullptr)));
  }();
  std::vector<Link> links;
  bool is_padded = false, was_compiled = false;
  for (const auto& given : loaded) {
    const auto source = given.attr("source").cast<std::string>();
    was_compiled |= source == "compiled";
    ++(source == "compiled" ? counters.compilations : source == "disk" ? counters.disk_hits : counters.memory_hits);
    is_padded |= given.attr("executable").attr("is_padded").cast<bool>();
    links.push_back(link_of(given, device_));
  }
  if (was_compiled) {
    counters.compile_seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  }
  if (specialization.is_loaded()) { // by a turn inside this one
    return;
  }
  specialization.is_padded = is_padded;
  specialization.was_evicted = true; // if it is asked for again
  specialization.links = std::move(links);
  specialization.last_launch = num_launched_;
}

void ProgramCache::make_room(size_t num_programs) {
  num_loaded_ += num_programs;
  if (num_loaded_ < kLoadedBetweenLooks) {
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
    Specialization* specialization;
  };
  std::vector<Candidate> unused;
  for (const auto& [hash, bucket] : programs_) {
    for (const auto& program : bucket) {
      for (const auto& specialization : program->specializations) {
        if (specialization->is_loaded() && specialization.use_count() == 1 &&
            specialization->last_launch <= last_look_) {
          unused.push_back({program.get(), specialization.get()});
        }
      }
    }
  }
  last_look_ = num_launched_;
  const auto middle = unused.begin() + static_cast<std::ptrdiff_t>((unused.size() + 1) / 2);
  std::nth_element(unused.begin(), middle, unused.end(), [](const Candidate& some, const Candidate& other) {
    return some.specialization->last_launch < other.specialization->last_launch;
  });
  std::vector<std::vector<Link>> evicted; // released when nothing is half done: that runs Python
  std::for_each(unused.begin(), middle, [&](const Candidate& candidate) {
    candidate.program->is_prepared = false;
    evicted.push_back(std::exchange(candidate.specialization->links, {}));
  });
  evicted.clear();
  if (is_short()) {
    TORCH_WARN_ONCE(
        "the process has few memory mappings left, and programs of the device hold only a part of them: programs that "
        "were "
        "not used lately are compiled again when they are; raise vm.max_map_count");
  }
}

void ProgramCache::forget() {
  std::vector<std::vector<Link>> forgotten; // released when nothing is half done: that runs Python
  for (const auto& [hash, bucket] : programs_) {
    for (const auto& program : bucket) {
      for (const auto& specialization : program->specializations) {
        forgotten.push_back(std::exchange(specialization->links, {}));
        specialization->spare.clear();
      }
    }
  }
  programs_.clear();
  num_loaded_ = 0;
}

ProgramCache::Started ProgramCache::start(Link& link, PyObject* arguments, const RuntimeNumbers& numbers) {
  const auto add = [&](PyObject* array) {
    if (PyList_Append(arguments, array) != 0) {
      throw py::error_already_set();
    }
  };
  {
    const WithoutCollector without_collector;
    if (!numbers.floats.empty()) {
      add(packed(numbers.floats, link.device, link.packed.last_floats, link.packed.floats));
    }
    if (!numbers.doubles.empty()) {
      add(packed(numbers.doubles, link.device, link.packed.last_doubles, link.packed.doubles));
    }
    if (!numbers.integers.empty()) {
      add(packed(numbers.integers, link.device, link.packed.last_integers, link.packed.integers));
    }
  }
  static PyObject* const consume = PyUnicode_InternFromString("consume_with_handlers");
  static PyObject* const consume_token = PyUnicode_InternFromString("consume_token");
  static PyObject* const keywords = py::make_tuple("with_tokens").release().ptr();
  PyObject* const call[] = {arguments, Py_True};
  auto results = py::reinterpret_steal<py::object>(check(PyObject_Vectorcall(link.execute.get(), call, 1, keywords)));
  const WithoutCollector without_collector;
  auto arrays =
      py::reinterpret_steal<py::object>(check(PyObject_CallMethodOneArg(results.ptr(), consume, link.handlers.get())));
  return {std::move(arrays), shared_reference(check(PyObject_CallMethodNoArgs(results.ptr(), consume_token)).ptr())};
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

std::exception_ptr ProgramCache::execute(Specialization& specialization, Segment& segment) {
  std::exception_ptr interrupt;
  size_t num_tries = 0; // of this link
  for (size_t i = 0; i < specialization.links.size();) {
    try {
      launch(specialization.links[i], segment);
      ++i;
      num_tries = 0;
    } catch (const py::error_already_set& error) {
      if (i == 0 || !is_interrupt(error)) {
        throw;
      }
      // What was launched cannot be taken back: the rest is launched first.
      TORCH_CHECK(++num_tries < kMostTries, "a chain of programs was interrupted between its launches: ", error.what());
      interrupt = std::current_exception();
    }
  }
  specialization.last_launch = num_launched_;
  return interrupt;
}

void ProgramCache::launch(Link& link, Segment& segment) {
  const auto numbers = link.numbers_of(segment); // not in the link: a finalizer in here may launch it, too
  py::list arguments(link.inputs.size());
  for (size_t i = 0; i < link.inputs.size(); ++i) {
    const ValuePtr& value = segment.values[link.inputs[i]];
    PyObject* argument = argument_of(*value, link.is_donated[i] != 0, /*is_shared=*/value.use_count() > 1);
    PyList_SET_ITEM(arguments.ptr(), static_cast<Py_ssize_t>(i), argument);
  }
  auto [arrays, token] = start(link, arguments.ptr(), numbers);
  ValuePtr first;
  for (size_t i = 0; i < link.outputs.size(); ++i) {
    if (link.outputs[i] < 0) {
      continue;
    }
    const ValuePtr& value = segment.values[link.outputs[i]];
    value->array = Py_NewRef(check(PyList_GetItem(arrays.ptr(), static_cast<Py_ssize_t>(i))).ptr());
    value->launch = num_launched_ + 1;
    if (!first) {
      first = value;
    }
  }
  remember(token, first);
  if (link.has_bounds_checks) {
    PyObject* out_of_range = check(PyList_GetItem(arrays.ptr(), static_cast<Py_ssize_t>(link.outputs.size()))).ptr();
    segment.unchecked.push_back(
        {num_launched_,
         token,
         shared_reference(Py_NewRef(out_of_range)),
         link.bounds_checks,
         link.checked_of(segment)});
  }
  for (const int32_t local : link.dropped) {
    const ValuePtr& value = segment.values[local];
    if (value.use_count() == 1) {
      Py_CLEAR(value->array);
    }
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

// What other ranks say is told in their words.
template <class Act>
static void with_ranks(Segment& segment, const Act& act) {
  try {
    act();
  } catch (const py::error_already_set& error) {
    if (is_interrupt(error)) {
      throw;
    }
    const auto message = py::str(error.value()).cast<std::string>();
    segment.fail(kProgramFailed + message);
    TORCH_CHECK(false, message);
  }
}

std::exception_ptr ProgramCache::run(Segment& segment, const Results& results, bool may_be_parts, Counters& counters) {
  if (!is_launched(segment, results.locals, results.policy)) {
    return nullptr;
  }
  for (int32_t local : segment.inputs) {
    const Value& value = *segment.values[local];
    if (const auto error = value.error; error != nullptr) { // it was in flight when this was recorded
      segment.fail(*error);
      TORCH_CHECK(false, kNoValue, *error);
    }
    TORCH_INTERNAL_ASSERT(value.array != nullptr, "a segment is run before the one whose values it reads");
  }
  try {
    Program& program = find(segment, results.policy);
    const bool is_of_ranks = program.policy == Policy::Declared && has_collectives(segment);
    if (is_of_ranks) {
      with_ranks(segment, [&] { agree(program, segment, results); });
    }
    const auto specialization = choose(program, segment, results.locals, may_be_parts, counters);
    if (is_of_ranks) {
      with_ranks(segment, [&] { announce(program, *specialization, segment); });
    }
    const auto interrupt = execute(*specialization, segment);
    segment.specialization = specialization;
    counters.segments_run += specialization->links.size();
    if (specialization->in_parts) {
      ++counters.segments_in_parts;
      ++program.num_runs_in_parts;
    }
    return interrupt;
  } catch (py::error_already_set& error) {
    if (is_interrupt(error)) {
      throw;
    }
    const std::string message = error.what();
    segment.fail(kProgramFailed + message);
    throw_torch_error(message);
  }
}

} // namespace tpu
