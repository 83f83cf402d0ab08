// What the device knows about one ATen overload: how it is called, which lowering serves it, what it writes.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace tpu {

// What becomes of a number that is passed to an op.
enum class NumberPolicy : uint8_t {
  Static,  // part of the program, so a new value is a new program
  Runtime, // an input of the program
};

// The dtype that must be able to hold a number: PyTorch's kernels convert it and raise where it overflows.
enum class Fits : uint8_t {
  Any,     // wraps, or becomes infinite
  Result,  // the dtype that the op computes
  Opmath,  // the same, but float32 for the 16-bit floats
  Written, // as Result, where the number becomes an element at all
};

struct ArgInfo {
  bool is_out{false}; // an out= argument: written, and not an argument of the lowering
  bool is_read{true}; // false for out= and where an in-place op ignores what was there (fill_, normal_)
  bool is_written{false};
  int written_with{-1};           // the argument without which it is not (gradients: grad_scale); -1: always written
  bool zero_or_one_static{false}; // alpha and beta: 0 and 1 are worth a program of their own
  NumberPolicy policy{NumberPolicy::Static};
  Fits fits{Fits::Any};
};

using ArgumentCheck = void (*)(c10::ArrayRef<c10::IValue> args);

struct OpInfo {
  uint32_t id;
  c10::OperatorHandle handle;
  std::string table_name;                        // the lowering, e.g. "add.Tensor"
  std::optional<c10::OperatorHandle> functional; // the overload that table_name stands for, if ATen has it
  // For forms whose shapes depend on data (`x[mask]`): "tpu::dynamic_index.Tensor"; see data_dependent.py.  And for the
  // sparse gradient of embedding_bag.
  std::optional<c10::OperatorHandle> data_dependent;
  int num_draws{0}; // random numbers it takes from the generator, each a (seed, offset)
  std::vector<ArgInfo> args;
  // For each return: the argument that it aliases and writes, or -1 for something new.
  std::vector<int> returned_arg;
  // Arguments that are written and not returned (`_foreach_add_`, running statistics), in schema order.
  std::vector<int> silently_written;
  ArgumentCheck check{nullptr};   // raises where an argument's value is wrong
  bool is_fill{false};            // writes one value everywhere: PyTorch lets it write places that elements share
  bool has_parts{false};          // PyTorch has a kernel that is made of other ops (`_foreach_add_` of `add_`)
  bool is_foreach{false};         // of lists, which it may write
  bool is_collective{false};      // of the ranks of a group
  bool is_pointwise{false};       // PyTorch refuses inputs that overlap what is written in part
  bool keeps_shape_of_out{false}; // where it has as many elements (`arange`)
  bool writes_apart{false};       // PyTorch refuses inputs that share memory with what is written (`index_add_`)
  bool keeps_first_dtype{false};  // the result is of the first argument's dtype, where the meta kernel promotes
  bool sums_in_out_dtype{false};  // `out=` of another dtype is the dtype that it computes in
};

struct LoweredOp {
  std::string overload;   // "aten::add_.Tensor"
  std::string table_name; // "add.Tensor"
  std::vector<std::string> static_args;
  std::vector<std::string> runtime_args;
  std::vector<std::string> unread_args;
  int num_draws;
  std::map<std::string, std::string> fits{}; // by argument: "result", "opmath" or "written"
};

// Register the recorder as PrivateUse1 kernel of every overload given.  Called once, at first use of the device.
void register_lowered_ops(const std::vector<LoweredOp>& ops);

} // namespace tpu
