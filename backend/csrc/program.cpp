#include "program.h"

#include "launcher.h"
#include "python_error.h"
#include "stream.h"

#include <ATen/Context.h>
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <set>

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

// The last run in parts of a process that begins so (`Parts::First`).  A count, not a moment: the last digits change with it,
// and a script that is run again gives the same.  So many steps take longer than most programs, which the next run waits for
// (Llama of 32 layers, two cores: 14 s, 0.25 s a step).  Where XLA takes much longer than that, they go on in parts meanwhile.
constexpr size_t kLastRunInParts = 256;

// The run in parts, counted from 1, at which a thread begins to compile the one program.  Never the first, which shares its
// cores with nothing.  Where nobody said that the one program will be wanted, what is run less often (an initialisation, a look
// at a few batches) is not compiled a second time.
constexpr size_t kRunThatPrepares = 2;
constexpr size_t kRunThatPreparesUnasked = 32;

// Segments of fewer values are not looked at for parts.
constexpr size_t kFewestValuesOfParts = 36;

// Runtime numbers travel packed, one array a dtype; the array of the last call is used again when nothing changed.
template <class T>
PyObject* packed(
    const std::vector<T>& numbers, c10::DeviceIndex device, std::string& last, std::shared_ptr<PyObject>& array) {
  const std::string_view bytes(reinterpret_cast<const char*>(numbers.data()), numbers.size() * sizeof(T));
  if (array != nullptr && bytes == last) {
    return array.get();
  }
  py::array_t<T> host(static_cast<py::ssize_t>(numbers.size()));
  std::memcpy(host.mutable_data(), numbers.data(), bytes.size());
  PyObject* fresh = PyObject_CallFunction(runtime().put_numbers, "Oi", host.ptr(), static_cast<int>(device));
  array = shared_reference(check(fresh).ptr());
  last.assign(bytes);
  return array.get();
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
Variant* fitting_variant(const Program& program, const Segment& segment, const Locals& live, bool in_parts) {
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
    if (variant->in_parts != in_parts || (variant->is_padded && !takes_padded)) {
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
py::dict describe(const Program& program, const Variant& variant, const Segment& segment, c10::DeviceIndex device) {
  py::dict description;
  description["device"] = static_cast<int>(device);
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
  description["was_evicted"] = variant.was_evicted;
  description["may_be_padded"] = may_be_padded(segment);
  description["in_parts"] = variant.in_parts;
  description["was_in_parts"] = program.num_runs_in_parts > 0;
  // Of use to a chain alone:
  description["origin"] = py::cast(segment.origin);
  std::vector<uint32_t> checked;
  for (const auto& entry : segment.checked) {
    checked.push_back(entry.entry);
  }
  description["checked"] = py::cast(checked);
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
  link.demands = attribute(executable, "demands");
  link.has_offenders = py::len(py::handle(link.demands.get())) > 0;
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

void Link::take_numbers(const Segment& segment) {
  const auto take = [](auto& taken, const auto& all, const std::vector<uint32_t>& places) {
    for (const uint32_t place : places) {
      taken.push_back(all[place]);
    }
  };
  numbers.clear();
  take(numbers.floats, segment.numbers.floats, floats);
  take(numbers.doubles, segment.numbers.doubles, doubles);
  take(numbers.integers, segment.numbers.integers, integers);
  take(numbers.integers, segment.offsets, offsets);
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

std::shared_ptr<Variant> ProgramCache::choose(
    Program& program, const Segment& segment, const Locals& live, bool may_be_parts, Counters& counters) {
  const auto whole = [&] { return variant_for(program, segment, live, /*in_parts=*/false, counters); };
  // Parts are compiled by threads, which a turn inside another one must not wait for.
  if (!may_be_parts || !mutex_.is_outermost_turn() || !has_parts(program, segment, live)) {
    return whole();
  }
  if (!program.grows) {
    // Who asks for deterministic algorithms wants the same digits from the first run on.
    if (parts() == Parts::Never || (parts() == Parts::First && at::globalContext().deterministicAlgorithms())) {
      return whole();
    }
    if (parts() == Parts::First) {
      if (auto variant = whole_in_time(program, segment, live, counters)) {
        return variant;
      }
    }
  }
  auto chain = variant_for(program, segment, live, /*in_parts=*/true, counters);
  if (!program.grows) { // what grows stays in parts
    const size_t run = ++program.num_runs_in_parts;
    if ((parts() == Parts::Prepare && run >= kRunThatPrepares) || (parts() == Parts::First && run >= kRunThatPreparesUnasked)) {
      prepare(program, segment, live);
    }
  }
  ++counters.segments_in_parts;
  return chain;
}

std::shared_ptr<Variant> ProgramCache::whole_in_time(
    Program& program, const Segment& segment, const Locals& live, Counters& counters) {
  const bool is_there = program.is_rehearsed ||
      std::any_of(program.variants.begin(), program.variants.end(), [](const auto& variant) { return !variant->in_parts; });
  if (!is_there && (program.is_refused || program.num_runs_in_parts < kLastRunInParts)) {
    return nullptr;
  }
  try {
    return variant_for(program, segment, live, /*in_parts=*/false, counters);
  } catch (const py::error_already_set& error) {
    if (error.matches(PyExc_TimeoutError)) { // a thread still compiles it
      return nullptr;
    }
    if (is_there || is_interrupt(error)) {
      throw;
    }
    program.is_refused = true;
    const std::string message = error.what();
    TORCH_WARN(
        "steps that began in parts stay so: the one program that should follow cannot be compiled (",
        message.substr(0, message.find('\n')),
        ")");
    return nullptr;
  }
}

bool ProgramCache::has_parts(Program& program, const Segment& segment, const Locals& live) {
  const bool may_grow = mode() == Mode::Fused && may_be_padded(segment);
  if (cuts_after_each_op() || (parts() == Parts::Never && !may_grow)) {
    return false;
  }
  if (!program.num_parts && segment.values.size() < kFewestValuesOfParts) {
    program.num_parts = 1;
  }
  if (!program.num_parts) {
    const auto description = describe(program, *new_variant(program, segment, live), segment, device_);
    const auto plan = [&] {
      const StreamUnlocked unlocked(mutex_);
      return py::reinterpret_steal<py::object>(check(PyObject_CallOneArg(runtime().plan, description.ptr())));
    }();
    std::tie(program.num_parts, program.grows) = plan.cast<std::pair<size_t, bool>>();
  }
  return *program.num_parts > 1 && (program.grows ? may_grow || parts() != Parts::Never : true);
}

std::shared_ptr<Variant> ProgramCache::variant_for(
    Program& program, const Segment& segment, const Locals& live, bool in_parts, Counters& counters) {
  if (Variant* fitting = fitting_variant(program, segment, live, in_parts)) {
    auto known = fitting->shared_from_this();
    if (known->is_loaded()) {
      ++counters.memory_hits;
    } else {
      load(program, *known, segment, counters);
    }
    return known;
  }
  auto variant = new_variant(program, segment, live);
  variant->in_parts = in_parts;
  load(program, *variant, segment, counters);
  program.variants.push_back(variant);
  return variant;
}

void ProgramCache::load(const Program& program, Variant& variant, const Segment& segment, Counters& counters) {
  make_room(1);
  const auto start = std::chrono::steady_clock::now();
  const auto description = describe(program, variant, segment, device_);
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
  make_room(links.size() - 1);
  if (variant.is_loaded()) { // by a turn inside this one
    return;
  }
  variant.is_padded = is_padded;
  variant.was_evicted = true; // if it is asked for again
  variant.links = std::move(links);
  variant.last_launch = num_launched_;
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
  std::vector<std::vector<Link>> evicted; // released when nothing is half done: that runs Python
  std::for_each(unused.begin(), middle, [&](const Candidate& candidate) {
    candidate.program->is_prepared = false;
    evicted.push_back(std::exchange(candidate.variant->links, {}));
  });
  evicted.clear();
  if (is_short()) {
    TORCH_WARN_ONCE(
        "the process has few memory mappings left, and programs of the device hold only a part of them: programs that were "
        "not used lately are compiled again when they are; raise vm.max_map_count");
  }
}

void ProgramCache::rehearse(const Segment& segment) {
  Program& program = find(segment);
  prepare(program, segment, live_values(segment));
  program.is_rehearsed = true;
}

void ProgramCache::prepare(Program& program, const Segment& segment, const Locals& live) {
  if (std::exchange(program.is_prepared, true) || (live.empty() && segment.checked.empty())) {
    return;
  }
  const Variant* known = fitting_variant(program, segment, live, /*in_parts=*/false);
  if (known != nullptr && known->is_loaded()) {
    return;
  }
  const auto description = describe(program, known != nullptr ? *known : *new_variant(program, segment, live), segment, device_);
  make_room(1); // it will be loaded
  const StreamUnlocked unlocked(mutex_);
  check(PyObject_CallOneArg(runtime().prepare, description.ptr())).dec_ref();
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

std::exception_ptr ProgramCache::execute(Variant& variant, Segment& segment) {
  std::exception_ptr interrupt;
  for (Link& link : variant.links) {
    link.take_numbers(segment);
  }
  for (size_t i = 0; i < variant.links.size();) {
    try {
      launch(variant.links[i], segment);
      ++i;
    } catch (const py::error_already_set& error) {
      if (i == 0 || !is_interrupt(error)) {
        throw;
      }
      interrupt = std::current_exception(); // what was launched cannot be taken back: the rest is launched first
    }
  }
  variant.last_launch = num_launched_;
  return interrupt;
}

void ProgramCache::launch(Link& link, Segment& segment) {
  py::list arguments(link.inputs.size());
  for (size_t i = 0; i < link.inputs.size(); ++i) {
    const ValuePtr& value = segment.values[link.inputs[i]];
    PyObject* argument = argument_of(*value, link.is_donated[i] != 0, /*is_shared=*/value.use_count() > 1);
    PyList_SET_ITEM(arguments.ptr(), static_cast<Py_ssize_t>(i), argument);
  }
  auto [arrays, token] = start(link, arguments.ptr(), link.numbers);
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
  remember(std::move(token), first);
  if (link.has_offenders) {
    PyObject* offenders = check(PyList_GetItem(arrays.ptr(), static_cast<Py_ssize_t>(link.outputs.size()))).ptr();
    segment.unchecked.push_back(
        {num_launched_, shared_reference(Py_NewRef(offenders)), link.demands, link.checked_of(segment)});
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

std::exception_ptr ProgramCache::run(Segment& segment, bool may_be_parts, Counters& counters) {
  const Locals live = live_values(segment);
  if (live.empty() && segment.checked.empty()) {
    return nullptr; // nobody can see what was recorded
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
    const auto variant = choose(find(segment), segment, live, may_be_parts, counters);
    const auto interrupt = execute(*variant, segment);
    segment.variant = variant;
    counters.segments_run += variant->links.size();
    return interrupt;
  } catch (py::error_already_set& error) {
    if (is_interrupt(error)) {
      throw;
    }
    const std::string message = error.what();
    segment.fail(message);
    throw_torch_error(message);
  }
}

} // namespace tpu
