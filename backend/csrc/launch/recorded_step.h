// A step that was recorded once and can be launched again without its Python: what torch.tpu.capture stands on.
#pragma once

#include "launch/capture_sink.h"
#include "launch/watches.h"
#include "record/stream.h"

#include <pybind11/pybind11.h>

#include <memory>
#include <string>
#include <thread>

namespace tpu {

// What PyTorch keeps beside tensors and that decides how operations are recorded.
struct Guards {
  std::thread::id thread;
  Mode mode;
  bool grad_mode;
  bool inference_mode;
  bool autocast;
  c10::ScalarType autocast_dtype;
  bool deterministic;
  int precision; // of float32 matrix products
  c10::ScalarType default_dtype;

  static Guards now();
  pybind11::tuple key() const; // for dictionaries: equal where they are
  bool operator==(const Guards& other) const;
};

// A number of the program that is what a changing number of the host is, or its negative: a learning rate.
struct Binding {
  enum class Kind : uint8_t { Float, Double, Integer };
  Kind kind;
  size_t place; // among the numbers of this kind
  std::vector<std::pair<size_t, bool>>
      sources; // (host number, negated): all of those that it may be, so they must agree
};

// Why a step cannot be replayed, and what shows where: the signature of the op at fault, or -1; or the user's line.
struct Problem {
  std::string text;
  std::string advice{}; // what to do, where that can be said
  int64_t signature{-1};
  UserPlace place{};
};

class RecordedStep {
 public:
  // Begins: what is pending is handed over, and what this thread records from now on is noted.
  explicit RecordedStep(c10::DeviceIndex device);
  ~RecordedStep();
  RecordedStep(const RecordedStep&) = delete;
  RecordedStep& operator=(const RecordedStep&) = delete;

  // The step is recorded, for these arguments (tensors and all else, in order), and returned these tensors.  Runs it.
  std::optional<Problem> finish(const pybind11::list& arguments, const std::vector<at::Tensor>& results);
  // Nothing more is noted.
  void abandon();

  // What sets apart two steps that were finished; nothing where they are one program on the same storages.
  std::optional<Problem> difference(const RecordedStep& other) const;
  // Of tensors: whether it reads or writes where they are stored.
  std::vector<bool> uses(const std::vector<at::Tensor>& tensors) const;
  const SegmentRun& run() const { return run_; }
  const CaptureSink& record() const { return *record_; }

  // What is looked at; the numbers of the host when the step was recorded (those that are watched, then those among the
  // arguments); which of them may change, since it is known where they go in the program.
  void make_replayable(
      Watches watches, std::vector<double> numbers, std::vector<uint8_t> may_change, std::vector<Binding> bindings);
  // Launches it: the results, in order; or why it must be recorded anew: a text, or the number of a changed watch.
  // `arguments`: a list or a tuple.
  pybind11::object replay(const pybind11::sequence& arguments);

 private:
  using Handle = std::shared_ptr<BufferHandle>;
  struct Geometry {
    c10::DimVector sizes;
    c10::DimVector strides;
    int64_t offset;
    c10::ScalarType dtype;
    bool operator==(const Geometry&) const = default;
    static Geometry of(const at::Tensor& tensor);
  };
  struct Argument {
    std::shared_ptr<PyObject> type;
    std::shared_ptr<PyObject> value; // null for tensors and numbers, which may change
    bool is_number{false};
    Geometry geometry{};
    const Layout* layout{nullptr};
    bool requires_grad{false};
    size_t alias{0}; // the first argument that has this storage
  };
  // Where an input is taken from; several buffers may hold one value, and must then still do so.
  struct Source {
    size_t input;
    int64_t argument; // -1: a buffer that stays from step to step
    Handle buffer;
    auto key() const { return std::tuple(input, argument, argument >= 0 ? nullptr : buffer.get()); }
  };
  // Where an output goes.
  struct Target {
    size_t output;    // of the executable
    int64_t argument; // -1: none
    int64_t storage;  // which of the storages that are made for the results; -1: none
    Handle buffer;
    bool is_new; // the buffer was made by the step and is kept by somebody
    auto key() const {
      return std::tuple(output, argument, storage, is_new, is_new || argument >= 0 ? nullptr : buffer.get());
    }
  };
  struct Result {
    Geometry geometry;
    size_t storage;
    bool operator==(const Result&) const = default;
  };
  struct Taken {                    // what a replay found to be in order
    std::vector<Buffer*> arguments; // by argument; null for what is no tensor
    std::vector<Buffer*> inputs;    // by input
  };

  // A buffer and the value that it had when the step was recorded, before others could go on recording.
  struct Seen {
    Handle buffer;
    uintptr_t address;
    uint64_t segment;
    int32_t local;
  };
  std::vector<Seen> seen_buffers() const;
  std::optional<Problem> resolve(
      const pybind11::list& arguments, const std::vector<at::Tensor>& results, const std::vector<Seen>& seen_buffers);
  std::optional<std::string>
  take_arguments(const pybind11::sequence& arguments, Taken& taken, std::vector<double>& numbers) const;
  std::optional<std::string> take_inputs(Taken& taken) const;
  std::optional<std::string> set_numbers(const std::vector<double>& numbers);
  void draw();
  pybind11::object launch(Stream& stream, const Taken& taken);
  static bool is_shared(const ValuePtr& value);
  bool donates_shared(const Taken& taken) const;
  Buffer* buffer_for(const Target& target, const Taken& taken) const;

  const c10::DeviceIndex device_;
  const Guards guards_;
  const uintptr_t first_new_address_;
  const std::shared_ptr<CaptureSink> record_{std::make_shared<CaptureSink>()};
  bool is_recording_{false};
  SegmentRun run_;

  std::vector<Argument> arguments_;
  std::vector<Source> sources_; // by input
  std::vector<Target> targets_; // by output
  std::vector<Result> results_;
  size_t num_storages_{0};
  std::vector<uint8_t> is_donated_; // by input

  std::optional<Watches> watches_;
  std::vector<double> recorded_numbers_; // of the host
  std::vector<uint8_t> may_change_;      // by number of the host
  std::vector<Binding> bindings_;
  std::vector<at::Tensor> versioned_; // of those watched: what is written
};

} // namespace tpu
