// By what a segment is run: the one program or a chain, for which results, and which memory it takes over.
#include "launch/program.h"

#include "python_error.h"
#include "record/stream.h"

#include <ATen/Context.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <set>

namespace py = pybind11;

namespace tpu {
namespace {

// Of one program: sets of results that were kept, each with an executable that returns no others.
constexpr size_t kMostSetsOfResults = 4;

// The last run in parts of a process that begins so (`Parts::First`).  A count, not a moment: the last digits change
// with it, and a script that is run again gives the same.  So many steps take longer than most programs, which the next
// run waits for (Llama of 32 layers, two cores: 14 s, 0.25 s a step).  Where XLA takes much longer than that, they go
// on in parts meanwhile.
constexpr size_t kLastRunInParts = 256;

// The run in parts, counted from 1, at which a thread begins to compile the one program.  Never the first, which shares
// its cores with nothing.  Where nobody said that the one program will be wanted, what is run less often (an
// initialisation, a look at a few batches) is not compiled a second time.
constexpr size_t kRunThatPrepares = 2;
constexpr size_t kRunThatPreparesUnasked = 32;

// Segments of fewer values are not looked at for parts.
constexpr size_t kFewestValuesOfParts = 36;

// Whether a specialization takes the memory of just those inputs that this segment's results take the place of.  The
// tape does not say that of a result that is written without a look at what was there (`fill_`, `out=`).
bool donates_alike(const Specialization& specialization, const Segment& segment) {
  const auto num_donated = specialization.donated.size();
  for (size_t i = 0; i < specialization.outputs.size(); ++i) {
    const int32_t local = specialization.outputs[i];
    const int32_t origin = segment.origin[local];
    if (i < num_donated) {
      if (origin != specialization.donated[i]) {
        return false;
      }
    } else if (
        segment.is_input[origin] != 0 && segment.values[origin]->layout == segment.values[local]->layout &&
        !std::binary_search(specialization.donated.begin(), specialization.donated.end(), origin)) {
      return false;
    }
  }
  return true;
}

// What grows is noticed by what this process has run before.
bool may_be_padded(const Program& program, const Segment& segment) {
  return program.policy == Policy::Held && tpu::may_be_padded(segment);
}

// One that returns what is wanted: at least, or just that.
Specialization*
fitting_specialization(const Program& program, const Segment& segment, const Locals& results, bool in_parts) {
  const auto offsets_match = [&](const Specialization& specialization) {
    for (size_t i = 0; i < segment.offsets.size(); ++i) {
      if (specialization.offset_is_input[i] == 0 && specialization.offsets[i] != segment.offsets[i]) {
        return false;
      }
    }
    return true;
  };
  // An executable that returns more than is held will do: a kept metric or a late `del` compiles nothing.
  const auto returns_results = [&](const Specialization& specialization) {
    const auto& outputs = specialization.sorted_outputs;
    return program.policy == Policy::Declared
        ? std::equal(outputs.begin(), outputs.end(), results.begin(), results.end())
        : std::includes(outputs.begin(), outputs.end(), results.begin(), results.end());
  };
  const auto is_better = [&](const Specialization& specialization, const Specialization& other) {
    if (program.policy == Policy::Declared) { // the first of them: which are loaded is this process's own matter
      return false;
    }
    return specialization.is_loaded() != other.is_loaded() ? specialization.is_loaded()
                                                           : specialization.outputs.size() < other.outputs.size();
  };
  // A padded program, whose last digits may be others, serves only where padding is allowed now.
  const bool takes_padded = may_be_padded(program, segment);
  Specialization* best = nullptr;
  for (auto& specialization : program.specializations) {
    const bool is_as_agreed = specialization->agreement == program.agreement;
    if (specialization->in_parts != in_parts || !is_as_agreed || (specialization->is_padded && !takes_padded)) {
      continue;
    }
    if (offsets_match(*specialization) && returns_results(*specialization) && donates_alike(*specialization, segment) &&
        (best == nullptr || is_better(*specialization, *best))) {
      best = specialization.get();
    }
  }
  return best;
}

// (input, the output that takes its memory): a value that the segment replaced in its buffer gives it to the newest of
// those that did.  Whoever else holds the value changes nothing: a copy is donated then, see `argument_of`.
using Donations = std::vector<std::pair<int32_t, int32_t>>;

Donations donations_of(const Segment& segment, const std::vector<int32_t>& sorted_outputs) {
  Donations donations;
  for (int32_t local : sorted_outputs) {
    const int32_t origin = segment.origin[local];
    if (segment.is_input[origin] != 0 && segment.values[origin]->layout == segment.values[local]->layout) {
      donations.emplace_back(origin, local);
    }
  }
  std::sort(donations.begin(), donations.end());
  const auto is_same_input = [](const auto& some, const auto& other) {
    return some.first == other.first;
  };
  const auto kept = std::unique(donations.rbegin(), donations.rend(), is_same_input);
  donations.erase(donations.begin(), kept.base());
  return donations;
}

// The outputs of a new specialization, ascending.  Where several sets of results were held in turns, all that ever were
// are returned from then on: each program more returns one result more at least, so that they come to an end.
std::vector<int32_t> outputs_for(const Program& program, const Locals& results) {
  std::set<int32_t> outputs(results.begin(), results.end());
  if (program.policy == Policy::Declared) {
    return {outputs.begin(), outputs.end()};
  }
  std::set<std::vector<int32_t>> sets;
  for (const auto& specialization : program.specializations) {
    sets.insert(specialization->sorted_outputs);
  }
  if (sets.size() >= kMostSetsOfResults) {
    for (const auto& set : sets) {
      outputs.insert(set.begin(), set.end());
    }
  }
  return {outputs.begin(), outputs.end()};
}

std::shared_ptr<Specialization>
new_specialization(const Program& program, const Segment& segment, const Locals& results) {
  auto specialization = std::make_shared<Specialization>();
  specialization->offsets = segment.offsets;
  specialization->agreement = program.agreement;
  // Ranks may slice at different offsets and must share one program: unless they have agreed, offsets are inputs.
  specialization->offset_is_input.assign(segment.offsets.size(), static_cast<uint8_t>(has_collectives(segment)));
  if (program.agreement) {
    std::copy(program.offset_is_input.begin(), program.offset_is_input.end(), specialization->offset_is_input.begin());
  }
  // An offset that has been seen with two values becomes an input.
  for (const auto& other : program.specializations) {
    if (program.agreement) {
      break;
    }
    for (size_t i = 0; i < segment.offsets.size(); ++i) {
      specialization->offset_is_input[i] |=
          static_cast<uint8_t>(other->offset_is_input[i] != 0 || other->offsets[i] != segment.offsets[i]);
    }
  }
  specialization->sorted_outputs = outputs_for(program, results);
  // Donated inputs and the outputs that take over their memory stand in the same order, so that XLA pairs them so.
  for (const auto& [input, output] : donations_of(segment, specialization->sorted_outputs)) {
    specialization->donated.push_back(input);
    specialization->outputs.push_back(output);
  }
  for (int32_t local : specialization->sorted_outputs) {
    if (std::find(specialization->outputs.begin(), specialization->outputs.end(), local) ==
        specialization->outputs.end()) {
      specialization->outputs.push_back(local);
    }
  }
  return specialization;
}

} // namespace

py::dict describe(
    const Program& program, const Specialization& specialization, const Segment& segment, c10::DeviceIndex device) {
  py::dict description;
  description["device"] = static_cast<int>(device);
  description["tape"] = py::cast(segment.tape);
  description["circumstances"] = py::cast(segment.circumstances);
  py::list input_layouts;
  for (int32_t local : segment.inputs) {
    input_layouts.append(
        py::make_tuple(
            static_cast<int>(segment.values[local]->layout->dtype), py::cast(segment.values[local]->layout->dims)));
  }
  description["input_layouts"] = input_layouts;
  description["inputs"] = py::cast(segment.inputs);
  description["outputs"] = py::cast(specialization.outputs);
  description["donated"] = py::cast(specialization.donated);
  description["offsets"] = py::cast(segment.offsets);
  description["offset_is_input"] =
      py::cast(std::vector<bool>(specialization.offset_is_input.begin(), specialization.offset_is_input.end()));
  description["num_floats"] = segment.numbers.floats.size();
  description["num_doubles"] = segment.numbers.doubles.size();
  description["num_integers"] = segment.numbers.integers.size();
  description["was_evicted"] = specialization.was_evicted;
  description["may_be_padded"] = may_be_padded(program, segment);
  description["in_parts"] = specialization.in_parts;
  description["was_in_parts"] = program.num_runs_in_parts > 0;
  description["agreement"] = program.agreement ? py::handle(program.agreement.get()) : py::handle(Py_None);
  // Of use to a chain alone:
  description["origin"] = py::cast(segment.origin);
  std::vector<uint32_t> checked;
  for (const auto& entry : segment.checked) {
    checked.push_back(entry.entry);
  }
  description["checked"] = py::cast(checked);
  return description;
}

Results held_results(const Segment& segment) {
  Results results;
  for (size_t local = 0; local < segment.values.size(); ++local) {
    if (segment.is_input[local] == 0 && segment.values[local].use_count() > 1) {
      results.locals.push_back(static_cast<int32_t>(local));
    }
  }
  return results;
}

bool ProgramCache::is_known(const Program& program, const Segment& segment, const Locals& results) const {
  return fitting_specialization(program, segment, results, /*in_parts=*/false) != nullptr ||
      fitting_specialization(program, segment, results, /*in_parts=*/true) != nullptr;
}

py::dict ProgramCache::describe_new(const Program& program, const Segment& segment, const Locals& results) const {
  return describe(program, *new_specialization(program, segment, results), segment, device_);
}

Program& ProgramCache::find(const Segment& segment, Policy policy) {
  auto& bucket = programs_[segment.hash];
  for (auto& program : bucket) {
    if (program->policy == policy && program->tape == segment.tape) {
      return *program;
    }
  }
  bucket.push_back(std::make_unique<Program>());
  bucket.back()->tape = segment.tape;
  bucket.back()->policy = policy;
  return *bucket.back();
}

std::shared_ptr<Specialization> ProgramCache::choose(
    Program& program, const Segment& segment, const Locals& results, bool may_be_parts, Counters& counters) {
  const auto whole = [&] {
    return specialization_for(program, segment, results, Form::Whole, counters);
  };
  // Parts are compiled by threads, which a turn inside another one must not wait for.
  const PartsPlan plan = may_be_parts && mutex_.is_outermost_turn() ? plan_of(program, segment, results) : PartsPlan{};
  if (plan.num_parts <= 1) {
    return whole();
  }
  if (!plan.grows) {
    // Who asks for deterministic algorithms wants the same digits from the first run on.
    if (parts() == Parts::Never || (parts() == Parts::First && at::globalContext().deterministicAlgorithms())) {
      return whole();
    }
    if (parts() == Parts::First) {
      if (auto specialization = whole_in_time(program, segment, results, counters)) {
        return specialization;
      }
    }
  }
  auto chain = specialization_for(program, segment, results, Form::Parts, counters);
  if (!plan.grows) { // what grows stays in parts
    const size_t run = program.num_runs_in_parts + 1;
    if ((parts() == Parts::Prepare && run >= kRunThatPrepares) ||
        (parts() == Parts::First && run >= kRunThatPreparesUnasked)) {
      prepare(program, segment, results);
    }
  }
  return chain;
}

std::shared_ptr<Specialization>
ProgramCache::whole_in_time(Program& program, const Segment& segment, const Locals& results, Counters& counters) {
  const bool is_there = program.is_rehearsed ||
      std::any_of(program.specializations.begin(), program.specializations.end(), [](const auto& specialization) {
                          return !specialization->in_parts;
                        });
  if (!is_there && (program.is_refused || program.num_runs_in_parts < kLastRunInParts)) {
    return nullptr;
  }
  // How long a thread takes is this process's own matter.
  const Form form = program.policy == Policy::Declared ? Form::Whole : Form::WholeInTime;
  try {
    return specialization_for(program, segment, results, form, counters);
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

PartsPlan ProgramCache::plan_of(Program& program, const Segment& segment, const Locals& results) {
  const bool may_grow = mode() == Mode::Fused && may_be_padded(program, segment);
  const bool is_small = segment.values.size() < kFewestValuesOfParts;
  if (is_small || cuts_after_each_op() || (parts() == Parts::Never && !may_grow)) {
    return {};
  }
  auto& plan = is_without_gradients(segment) ? program.plan_without_gradients : program.plan;
  if (!plan) {
    const auto description = describe_new(program, segment, results);
    const auto planned = [&] {
      const StreamUnlocked unlocked(mutex_);
      return py::reinterpret_steal<py::object>(check(PyObject_CallOneArg(runtime().plan, description.ptr())));
    }();
    const auto [num_parts, grows] = planned.cast<std::pair<size_t, bool>>();
    plan = PartsPlan{num_parts, grows};
  }
  return plan->grows && !may_grow && parts() == Parts::Never ? PartsPlan{} : *plan;
}

std::shared_ptr<Specialization> ProgramCache::specialization_for(
    Program& program, const Segment& segment, const Locals& results, Form form, Counters& counters) {
  if (Specialization* fitting = fitting_specialization(program, segment, results, form == Form::Parts)) {
    auto known = fitting->shared_from_this();
    if (known->is_loaded()) {
      ++counters.memory_hits;
    } else {
      load(program, *known, segment, form, counters);
    }
    return known;
  }
  auto specialization = new_specialization(program, segment, results);
  specialization->in_parts = form == Form::Parts;
  load(program, *specialization, segment, form, counters);
  program.specializations.push_back(specialization);
  return specialization;
}

void ProgramCache::rehearse(const Segment& segment) {
  Program& program = find(segment, Policy::Held);
  prepare(program, segment, held_results(segment).locals);
  program.is_rehearsed = true;
}

void ProgramCache::prepare(Program& program, const Segment& segment, const Locals& results) {
  if (program.is_prepared || !is_launched(segment, results, program.policy)) {
    return;
  }
  const Specialization* known = fitting_specialization(program, segment, results, /*in_parts=*/false);
  if (known != nullptr && known->is_loaded()) {
    program.is_prepared = true;
    return;
  }
  const auto description =
      describe(program, known != nullptr ? *known : *new_specialization(program, segment, results), segment, device_);
  make_room(1); // it will be loaded
  {
    const StreamUnlocked unlocked(mutex_);
    check(PyObject_CallOneArg(runtime().prepare, description.ptr())).dec_ref();
  }
  program.is_prepared = true;
}

} // namespace tpu
