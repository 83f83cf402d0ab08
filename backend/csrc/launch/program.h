// Segments and the executables they run on.
#pragma once

#include "record/range_checks.h"
#include "record/signature.h"
#include "record/stream_lock.h"

#include <pybind11/pytypes.h>

#include <chrono>
#include <exception>
#include <memory>
#include <optional>
#include <unordered_map>

namespace tpu {

struct Counters;
struct Specialization;

// The inputs of a program that are not tensors, in the order in which they were recorded.
struct RuntimeNumbers {
  std::vector<float> floats;
  std::vector<double> doubles;
  std::vector<int64_t> integers;

  void clear() {
    floats.clear();
    doubles.clear();
    integers.clear();
  }
};

// Of a random op: where its seed is among the integers, its offset behind it; and what they were taken from.
struct Draw {
  size_t place;
  at::Generator generator;
  int count;
};

// Where an event was recorded: behind a segment.  Guarded by the stream's lock.
struct Position {
  size_t num_launched{0}; // the launches that it stands for; known once it is no longer pending
  bool is_pending{true};  // its segment is still to be launched
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
  std::vector<ValuePtr> values;        // by local number
  std::vector<int32_t> inputs;         // the locals that were there before
  std::vector<uint8_t> is_input;       // by local
  std::vector<int32_t> origin;         // by local: the first value of this segment in its buffer
  // What is not part of the key: starts of slices and runtime numbers.
  std::vector<int64_t> offsets;
  RuntimeNumbers numbers;
  std::vector<Draw> draws;
  std::vector<CheckedEntry> checked;              // entries that have bounds checks
  std::vector<RangeCheck> unchecked;              // of its launches
  std::shared_ptr<Specialization> specialization; // what it was run by
  std::shared_ptr<Position> position;             // of the events behind it; null: there are none
  uint64_t num_recorded{0};                       // entries of the stream up to its end; known once it is detached

  void clear();
  void fail(const std::string& message); // what was to be computed carries this error
  void push(uint32_t word) {
    tape.push_back(word);
    hash = (hash ^ word) * 0x9fb21c651e98df25ULL;
    hash ^= hash >> 29;
  }
};

// Runtime numbers as device arrays: most repeat from launch to launch, so the arrays of the last one are kept.
struct PackedNumbers {
  std::string last_floats, last_doubles, last_integers;
  std::shared_ptr<PyObject> floats, doubles, integers;
};

// A loaded program and its slots: where its arguments come from among a segment's values and numbers, and where its
// results go.
struct Link {
  std::shared_ptr<PyObject> executable; // tpu_backend.runtime.compiler.Executable
  std::shared_ptr<PyObject> execute;    // (list of arrays) -> results
  std::shared_ptr<PyObject> handlers;   // what makes arrays of the results
  std::shared_ptr<PyObject> bounds_checks;
  bool has_bounds_checks{false}; // as a last output
  c10::DeviceIndex device{0};    // where it is launched

  std::vector<int32_t> inputs;                              // locals
  std::vector<uint8_t> is_donated;                          // by input
  std::vector<int32_t> outputs;                             // locals; -1: nobody wants it
  std::vector<int32_t> dropped;                             // locals that no later link reads, and that are no results
  std::vector<uint32_t> floats, doubles, integers, offsets; // places among the segment's numbers
  std::vector<std::pair<uint32_t, uint32_t>>
      checked; // places among the segment's checked entries, and the entry's number here
  PackedNumbers packed;

  // Of a segment; offsets that are inputs stand behind the integers.
  RuntimeNumbers numbers_of(const Segment& segment) const;
  std::vector<CheckedEntry> checked_of(const Segment& segment) const;
};

// How a tape runs for these results and these constant offsets: as one program, or as a chain of programs.
struct Specialization : std::enable_shared_from_this<Specialization> {
  std::vector<uint8_t> offset_is_input;
  std::vector<int64_t> offsets; // where not an input
  std::vector<int32_t> outputs; // locals, in the order one program returns them
  std::vector<int32_t> sorted_outputs;
  std::vector<int32_t> donated;        // locals of inputs that are consumed, ascending; the outputs decide
  bool in_parts{false};                // a chain that was asked for
  bool is_padded{false};               // a program of it is longer than its part of the segment
  bool was_evicted{false};             // it was loaded before
  std::shared_ptr<PyObject> agreement; // of its program when it was made
  std::shared_ptr<PyObject> announce;  // () -> None: tells the other ranks of its launch; null: none was told
  std::vector<Link> links;             // empty where it is not loaded, see `make_room`
  // Values that a launch was the last to hold, by the output that takes their memory: the next launch's outputs.
  std::vector<ValuePtr> spare;
  size_t last_launch{0};

  bool is_loaded() const { return !links.empty(); }
};

// Whether a segment may be run by a chain.
enum class Parts : uint8_t {
  Never,   // one program
  First,   // the first times: then as one program, which a thread compiles meanwhile
  Prepare, // each time, while a thread compiles the one program
  Always,  // each time
};

// What picks the program of a tape.
enum class Policy : uint8_t {
  Held,     // the results that this process holds; a program that returns more will do
  Declared, // the declared results, and what was run under this policy: other processes that run the same pick the same
};

// How a segment can be taken apart.
struct PartsPlan {
  size_t num_parts{1};
  bool grows{false}; // they are the turns of a loop, whose sizes grow
};

// All that is known of a tape under a policy.  A hash alone decides nothing: the tapes are compared.
struct Program {
  std::vector<uint32_t> tape;
  Policy policy{Policy::Held};
  std::vector<std::shared_ptr<Specialization>> specializations; // who else holds one keeps it loaded
  std::optional<PartsPlan> plan, plan_without_gradients;        // unknown until it is asked
  size_t num_runs_in_parts{0};
  bool is_prepared{false};  // the one program was compiled ahead
  bool is_rehearsed{false}; // and that by a rehearsal
  bool is_refused{false};   // XLA could not compile it as one
  // In a region, with collectives: what the ranks agreed on, see tpu_backend/distributed/region_programs.py; null:
  // nothing yet.
  std::shared_ptr<PyObject> agreement;
  std::vector<bool> offset_is_input; // by that
};

using Locals = c10::SmallVector<int32_t, 16>;

// What a segment is to return.
struct Results {
  Locals locals; // ascending
  Policy policy{Policy::Held};
  bool compares{false}; // what is recorded with the other ranks, at each launch; declared ones alone
};

// Those that somebody can still see.
Results held_results(const Segment& segment);

struct Launched {
  std::shared_ptr<PyObject> token;       // of JAX: can be waited for, holds no memory of the device
  c10::weak_intrusive_ptr<Value> output; // the first; may be gone
};

// Whether it has collectives, which the ranks of their groups must launch together.
bool has_collectives(const Segment& segment);
// Whether anybody can see what was recorded: other ranks, too, where they launch a region's collectives together.
bool is_launched(const Segment& segment, const Locals& results, Policy policy);

// A value's array as an argument of a program, a new reference.  What is donated and somebody else may look at is
// copied, and the copy donated: the program is the same either way.  `is_shared`: others than the one it is taken from
// hold the value.
PyObject* argument_of(const Value& value, bool is_donated, bool is_shared);

// What tpu_backend/runtime/compiler.py is told of a program: a dictionary.
pybind11::dict
describe(const Program& program, const Specialization& specialization, const Segment& segment, c10::DeviceIndex device);

// In which form a specialization is wanted.
enum class Form : uint8_t {
  Whole,       // one program
  WholeInTime, // one program; TimeoutError where a thread compiles it for long
  Parts,       // a chain
};

class ProgramCache {
 public:
  // Of the stream; it is held whenever the cache is asked, and given away while Python compiles.
  ProgramCache(StreamMutex& mutex, c10::DeviceIndex device) : mutex_(mutex), device_(device) {}

  // A thread begins to compile what `run` would have compiled.
  void rehearse(const Segment& segment);
  // Runs a segment; its results become concrete.  `may_be_parts`: else it is one program.  Wants the GIL.  Returns an
  // interrupt that came between two launches, to be raised when the segment is dealt with.  Raises c10::Error, and the
  // values then carry the error; error_already_set for an interrupt before the first launch, and the segment may then
  // be run again; and what else C++ may raise.
  std::exception_ptr run(Segment& segment, const Results& results, bool may_be_parts, Counters& counters);

  // What comes out when a program is handed to XLA: a list of arrays, and what can be waited for.
  struct Started {
    pybind11::object arrays;
    std::shared_ptr<PyObject> token;
  };
  // Hands a list of arrays, to which the numbers are added, to XLA.  Raises error_already_set.
  static Started start(Link& link, PyObject* arguments, const RuntimeNumbers& numbers);
  // Counts a launch; the first of what it computes (null: nothing) tells whether it is done.
  void remember(std::shared_ptr<PyObject> token, const ValuePtr& first);

  // No program is known any more, and who holds one finds that it is not loaded.  Nobody may have a turn.
  void forget();

  // Those of the first `count` launches that may still be running.
  std::vector<Launched> launched(size_t count) const;
  std::shared_ptr<PyObject> token_of(size_t launch) const;
  size_t num_launched() const { return num_launched_; }

 private:
  Program& find(const Segment& segment, Policy policy);
  // Returns the specialization that runs a segment with these results.  Who holds it keeps it loaded.
  std::shared_ptr<Specialization>
  choose(Program& program, const Segment& segment, const Locals& results, bool may_be_parts, Counters& counters);
  // The one program, where it is time for it; null as long as the segment is to be run in parts.
  std::shared_ptr<Specialization>
  whole_in_time(Program& program, const Segment& segment, const Locals& results, Counters& counters);
  std::shared_ptr<Specialization>
  specialization_for(Program& program, const Segment& segment, const Locals& results, Form form, Counters& counters);
  // In a region: how a segment with collectives is launched is agreed on with the other ranks.  Waits for them where
  // they do not know it yet.
  void agree(Program& program, const Segment& segment, const Results& results);
  // Tells the other ranks what is launched next.  Waits for them the first time.
  void announce(const Program& program, Specialization& specialization, const Segment& segment);
  // Whether there is a specialization that runs the segment with these results.
  bool is_known(const Program& program, const Segment& segment, const Locals& results) const;
  pybind11::dict describe_new(const Program& program, const Segment& segment, const Locals& results) const;
  void
  load(const Program& program, Specialization& specialization, const Segment& segment, Form form, Counters& counters);
  // How it is to be taken apart, if it is.
  PartsPlan plan_of(Program& program, const Segment& segment, const Locals& results);
  // Called before so many programs are loaded.  Where the system would soon refuse more, evicts half of those that were
  // not used since it looked last, the oldest.
  void make_room(size_t num_programs);
  // A thread begins to compile the one program, if it is not there.
  void prepare(Program& program, const Segment& segment, const Locals& results);
  // As `run`.
  std::exception_ptr execute(Specialization& specialization, Segment& segment);
  void launch(Link& link, Segment& segment);

  StreamMutex& mutex_;
  const c10::DeviceIndex device_;
  std::unordered_map<uint64_t, std::vector<std::unique_ptr<Program>>> programs_;
  std::vector<Launched> launched_; // a ring
  size_t num_launched_{0};
  // Since it was looked whether there is room: programs loaded, and the launch that was the last.
  size_t num_loaded_{0};
  size_t last_look_{0};
};

// Callbacks into tpu_backend.runtime, set once at first use of the device.
struct Runtime {
  PyObject* trace_form{nullptr};     // (signature id) -> whether it is lowered, has bounds checks, reads the precision
  PyObject* agree{nullptr};          // (description, whether ranks must compare it) -> Agreement
  PyObject* plan{nullptr};           // (description) -> (number of parts, whether their sizes grow)
  PyObject* compile{nullptr};        // (description, may wait for another thread) -> Links
  PyObject* prepare{nullptr};        // (description) -> None: a thread begins what `compile` will ask for
  PyObject* is_room_short{nullptr};  // () -> bool: whether few more programs can be loaded
  PyObject* put_numbers{nullptr};    // (numpy array, device) -> jax.Array
  PyObject* put{nullptr};            // (cpu tensor, device) -> jax.Array
  PyObject* copy{nullptr};           // (jax.Array) -> one like it in memory of its own
  PyObject* get{nullptr};            // (jax.Array, dtype, token of its launch or None) -> cpu tensor
  PyObject* wait{nullptr};           // (tokens of launches) -> None, when they are done
  PyObject* after_debug_op{nullptr}; // (signature id, arrays, failure) -> None: waits, checks
  PyObject* describe_shortage{nullptr};   // () -> str: which tensors live, and what needs less
  PyObject* raise_range_error{nullptr};   // (out_of_range, bounds_checks, places) -> None: waits, raises
  std::vector<std::string> not_the_users; // how the names of PyTorch's files and ours begin
};
Runtime& runtime();

} // namespace tpu
