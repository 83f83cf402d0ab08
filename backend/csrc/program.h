// Segments and the executables they run on.
#pragma once

#include "range_checks.h"
#include "signature.h"
#include "stream_lock.h"

#include <pybind11/pytypes.h>

#include <chrono>
#include <memory>
#include <unordered_map>

namespace tpu {

struct Counters;
struct Piece; // see parts.h
struct Variant;
using PartPlan = std::vector<std::vector<Piece>>;

// The inputs of a program that are not tensors, in the order in which they were recorded.
struct RuntimeNumbers {
  std::vector<float> floats;
  std::vector<double> doubles;
  std::vector<int64_t> integers;
};

// Of a random op: where its seed is among the integers, its offset behind it; and what they were taken from.
struct Draw {
  size_t place;
  at::Generator generator;
  int count;
};

// Where an entry's share of a segment begins.
struct Mark {
  uint32_t tape, values, offsets, floats, doubles, integers;
};

// Where an event was recorded: behind a segment.  Guarded by the stream's lock.
struct Position {
  size_t num_launched{0}; // the launches that it stands for; known once it is no longer pending
  bool is_pending{true}; // its segment is still to be launched
  bool is_timed{false};
  std::chrono::steady_clock::time_point time{}; // when those launches were done
};

struct Segment {
  uint64_t serial{0};
  // For each entry its signature id and then the local numbers of the values it reads.
  std::vector<uint32_t> tape;
  uint64_t hash{0};
  std::vector<const Signature*> entries;
  std::vector<uint64_t> circumstances; // by entry, see EncodedCall; not part of the key
  std::vector<Mark> marks; // by entry
  std::vector<ValuePtr> values; // by local number
  std::vector<int32_t> inputs; // the locals that were there before
  std::vector<uint8_t> is_input; // by local
  std::vector<int32_t> origin; // by local: the input whose buffer it has taken over, or -1
  // What is not part of the key: starts of slices and runtime numbers.
  std::vector<int64_t> offsets;
  RuntimeNumbers numbers;
  std::vector<Draw> draws;
  std::vector<CheckedEntry> checked; // entries that make demands of their indices
  PyObject* offenders{nullptr}; // what came out of them when the segment was run, owned
  Variant* variant{nullptr}; // what it was run by
  std::shared_ptr<Position> position; // of the events behind it; null: there are none
  uint64_t num_recorded{0}; // entries of the stream up to its end; known once it is detached

  Mark end() const;
  Mark mark_after(size_t entry) const {
    return entry + 1 < marks.size() ? marks[entry + 1] : end();
  }
  // PyTorch's matrix product precision when it was recorded; 0 where it does not matter.
  uint32_t precision_of(size_t entry) const {
    return entries[entry]->reads_precision ? tape[marks[entry].tape + 1] : 0;
  }
  // Parts have no marks, and are not taken apart again.
  bool is_part() const {
    return marks.size() != entries.size();
  }
  // The locals that an entry reads.
  c10::ArrayRef<uint32_t> links_of(size_t entry) const {
    const size_t begin = marks[entry].tape + (entries[entry]->reads_precision ? 2 : 1);
    return {tape.data() + begin, mark_after(entry).tape - begin};
  }

  void clear();
  void fail(const std::string& message); // what was to be computed carries this error
  void push(uint32_t word) {
    tape.push_back(word);
    hash = (hash ^ word) * 0x9fb21c651e98df25ULL;
    hash ^= hash >> 29;
  }
};

// One executable of a program: for these outputs and these constant offsets.
struct Variant : std::enable_shared_from_this<Variant> {
  std::vector<uint8_t> offset_is_input;
  std::vector<int64_t> offsets; // where not an input
  std::vector<int32_t> outputs; // locals, in the order the executable returns them
  std::vector<int32_t> sorted_outputs;
  std::vector<int32_t> donated; // locals of inputs that the executable consumes, ascending; the outputs decide
  // Owned, all of these.  Null where it was given back, see `make_room`:
  PyObject* executable{nullptr}; // tpu_backend.runtime.compiler.Executable
  PyObject* execute{nullptr}; // (list of arrays) -> results
  PyObject* handlers{nullptr}; // what makes arrays of the results
  // Never freed:
  PyObject* demands{nullptr}; // of indices; null until it is compiled
  bool has_offenders{false}; // as a last output
  bool is_padded{false}; // its program is longer than the segment
  // The numbers passed last and their device arrays: most repeat from call to call.
  std::string last_floats, last_doubles, last_integers;
  PyObject* float_array{nullptr};
  PyObject* double_array{nullptr};
  PyObject* integer_array{nullptr};
  // Values that a launch was the last to hold, by the output that takes their memory: the next launch's outputs.
  std::vector<ValuePtr> spare;
  size_t last_launch{0};

  bool is_loaded() const {
    return execute != nullptr;
  }
};

// A hash alone decides nothing: the tapes are compared.
struct Program {
  std::vector<uint32_t> tape;
  std::vector<std::shared_ptr<Variant>> variants; // who else holds one keeps it loaded
  std::shared_ptr<const PartPlan> parts; // once it was asked how it is taken apart
  size_t num_layered{0}; // how often it was run in parts
  bool is_prepared{false}; // it was compiled ahead
  bool is_rehearsed{false}; // and that by a rehearsal
  bool is_refused{false}; // XLA could not compile it as one
};

using Locals = c10::SmallVector<int32_t, 16>;

struct Launched {
  std::shared_ptr<PyObject> token; // of JAX: can be waited for, holds no memory of the device
  c10::weak_intrusive_ptr<Value> output; // the first; may be gone
};

// Whether anybody can see what comes of a segment.
bool is_wanted(const Segment& segment);

// A value's array as an argument of a program, a new reference.  What is donated and somebody else may look at is copied, and
// the copy donated: the program is the same either way.  `is_shared`: others than the one it is taken from hold the value.
PyObject* argument_of(const Value& value, bool is_donated, bool is_shared);

class ProgramCache {
 public:
  // Of the stream; it is held whenever the cache is asked, and given away while Python compiles.
  explicit ProgramCache(StreamMutex& mutex) : mutex_(mutex) {}

  // Whether a segment is to be run in parts still: neither was it run or rehearsed as one program, nor so often in parts, or
  // XLA refuses the one program, which a warning says.
  bool begins_layered(const Segment& segment, size_t most_layered_runs, Counters& counters);
  // How a segment is taken apart.
  const PartPlan* parts_of(const Segment& segment);
  size_t num_layered(const Segment& segment) {
    return find(segment).num_layered;
  }
  void count_layered(const Segment& segment) {
    ++find(segment).num_layered;
  }
  // A thread begins to compile what `run` would have compiled.
  void rehearse(const Segment& segment);
  // What `run` would have compiled, as Python is told it: None if it has the program, or began to prepare it before.
  pybind11::object description_to_prepare(const Segment& segment);
  // A thread begins to compile what `description_to_prepare` gave for it.
  void prepare(const Segment& segment, const pybind11::object& description);
  // Compiles what segments that are run one after the other need, as far as there are cores at once, and waits for it.
  void compile_all(const std::vector<Segment>& parts, Counters& counters);

  // Runs a segment; its live values become concrete.  Wants the GIL.  Raises c10::Error, and the values then carry the error;
  // error_already_set for an interrupt, and the segment may then be run again; and what else C++ may raise.
  void run(Segment& segment, Counters& counters);

  // What comes out when a program is handed to XLA: a list of arrays, and what can be waited for.
  struct Started {
    pybind11::object arrays;
    std::shared_ptr<PyObject> token;
  };
  // Hands a list of arrays, to which the numbers are added, and what a variant donates of them to XLA.  Raises
  // error_already_set.
  static Started start(Variant& variant, PyObject* arguments, const RuntimeNumbers& numbers);
  // Counts a launch; the first of what it computes (null: nothing) tells whether it is done.
  void remember(std::shared_ptr<PyObject> token, const ValuePtr& first);

  // Those of the first `count` launches that may still be running.
  std::vector<Launched> launched(size_t count) const;
  std::shared_ptr<PyObject> token_of(size_t launch) const;
  size_t num_launched() const {
    return num_launched_;
  }

 private:
  Program& find(const Segment& segment);
  // Who holds what it returns keeps it loaded.
  std::shared_ptr<Variant> variant_for(
      Program& program, const Segment& segment, const Locals& live, Counters& counters);
  void load(const Program& program, Variant& variant, const Segment& segment, Counters& counters);
  // Called before a program is loaded.  Where the system would soon refuse that, gives back half of those that were not used
  // since it looked last, the oldest.
  void make_room();
  // What `run` of each would have compiled; each program once.
  std::vector<pybind11::object> descriptions_of(const std::vector<Segment>& parts);
  void compile_ahead(const pybind11::list& descriptions, bool waits);
  pybind11::object description_of(const Segment& segment, const Locals& live);
  void execute(Variant& variant, Segment& segment);

  StreamMutex& mutex_;
  std::unordered_map<uint64_t, std::vector<std::unique_ptr<Program>>> programs_;
  std::vector<Launched> launched_; // a ring
  size_t num_launched_{0};
  // Since it was looked whether there is room: programs loaded, and the launch that was the last.
  size_t num_loaded_{0};
  size_t last_look_{0};
};

// Callbacks into tpu_backend.runtime, set once at first use of the device.
struct Runtime {
  PyObject* trace_form{nullptr}; // (signature id) -> whether it is lowered, makes demands of indices, reads the precision
  PyObject* compile{nullptr}; // (description, may wait for another thread) -> Executable
  PyObject* is_room_short{nullptr}; // () -> bool: whether few more programs can be loaded
  // (descriptions, waits) -> None: begins what `compile` of each will ask for; waits until all of it is there, or has failed
  PyObject* compile_ahead{nullptr};
  PyObject* put_numbers{nullptr}; // (numpy array) -> jax.Array
  PyObject* put{nullptr}; // (cpu tensor, device) -> jax.Array
  PyObject* copy{nullptr}; // (jax.Array) -> one like it in memory of its own
  PyObject* get{nullptr}; // (jax.Array, dtype, token of its launch or None) -> cpu tensor
  PyObject* wait{nullptr}; // (tokens of launches) -> None, when they are done
  PyObject* after_debug_op{nullptr}; // (signature id, arrays, failure) -> None: waits, checks
  PyObject* describe_shortage{nullptr}; // () -> str: which tensors live, and what needs less
  PyObject* raise_range_error{nullptr}; // (offenders, demands, places) -> None: waits, raises
  std::vector<std::string> not_the_users; // how the names of PyTorch's files and ours begin
};
Runtime& runtime();

} // namespace tpu
