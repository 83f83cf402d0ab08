// A signature is everything about one recorded op that shapes its program: the overload, the geometry of each tensor,
// static arguments.  It is a flat run of words, interned, so that the stream holds one number an op.
#pragma once

#include "record/op.h"
#include "record/value.h"

#include <ATen/core/Generator.h>
#include <c10/util/SmallVector.h>

namespace tpu {

// The low 8 bits of a word say what it is; the rest is payload, and more words may follow.
enum class Tag : uint8_t {
  None = 0,
  TensorWhole, // the tensor is its buffer: payload layout id
  TensorView,  // payload ndim | kind << 8 | dtype << 16 | layout id << 24; then sizes, strides
  List,        // payload length; then the elements
  Runtime,     // a number that is a program input: payload is_integer | dtype << 8 | wrapped << 16
  Int,         // one word
  Double,      // one word, its bits
  Complex,     // two words
  Bool,        // payload
  IntList,     // payload length, then words
  DoubleList,  // the same
  BoolList,    // the same
  String,      // payload interned id
  Random,      // a generator: two integers (seed, offset) are program inputs
  Repeated,    // payload length: a list whose elements are all the value that follows
};

enum class ViewKind : uint8_t {
  Dense = 1, // covers the buffer: a permutation or a reshape of it; the offset is 0
  Box,       // a box of the mixed-radix digits; its offset travels beside the signature
  General,   // anything else; its offset travels beside the signature
};

constexpr uint64_t tagged(Tag tag, uint64_t payload = 0) {
  return static_cast<uint64_t>(tag) | payload << 8;
}
constexpr Tag tag_of(uint64_t word) {
  return static_cast<Tag>(word & 0xff);
}
constexpr uint64_t payload_of(uint64_t word) {
  return word >> 8;
}

// The op, and torch's default dtype: it decides what integers divided by a number become, and what `arange` makes.
constexpr uint64_t first_word(uint32_t op_id, c10::ScalarType default_dtype) {
  return op_id | static_cast<uint64_t>(default_dtype) << 32;
}
constexpr c10::ScalarType default_dtype_of(uint64_t first_word) {
  return static_cast<c10::ScalarType>(first_word >> 32);
}

// How an output reaches its buffer.
struct OutputInfo {
  int written_arg{-1};        // -1: a new tensor
  int element{-1};            // of a list: which one
  int return_slot{-1};        // the return it is, or part of; -1 where only an argument is written
  bool undefined{false};      // not computed (an output_mask entry that is false)
  bool partial{false};        // only a part of the buffer is written: its old value is read as well
  std::vector<int64_t> sizes; // of the tensor written or made
  std::vector<int64_t> strides;
  c10::ScalarType dtype{c10::kFloat};  // of the tensor written or made
  const Layout* layout{nullptr};       // of the value that is produced
  std::vector<int64_t> computed_sizes; // what the functional op gives, before it is written
  c10::ScalarType computed_dtype{c10::kFloat};
  bool skip{false}; // no elements: nothing to write
};

// A runtime number that a dtype must be able to hold.
struct NumberFit {
  uint32_t number; // its place among the call's
  c10::ScalarType dtype;

  bool operator==(const NumberFit&) const = default;
};

// An out= argument that must first be resized.
struct OutResize {
  int arg;
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides; // empty: contiguous
};

struct Signature {
  uint32_t id{0};
  const OpInfo* op{nullptr};     // null for the device's own entries
  std::vector<uint64_t> words{}; // words[0] is `first_word`; of the device's own entries the id alone
  std::vector<OutputInfo> outputs{};
  bool wide{false};                     // runtime floats travel as float64, else as float32
  std::vector<NumberFit> fits{};        // checked at each call: values are no part of a signature
  std::vector<OutResize> out_resizes{}; // out= arguments that must first be resized
  bool on_cpu{false};                   // the lowering cannot express this form: it runs on the CPU
  std::string lowering_failure;         // why, where the lowering failed on arguments that may be wrong
  bool by_parts{false};                 // lists of tensors of two devices: PyTorch's own kernel takes them one by one
  bool checked{false};                  // the lowering has bounds checks
  bool reads_precision{false};          // the lowering reads PyTorch's matrix product precision
};

// A tensor argument that was met while an op was encoded.
struct TensorRef {
  Buffer* buffer;
  bool reads; // an out= argument that is wholly overwritten is not read
};

struct RuntimeNumber {
  bool is_integer;
  union {
    double real;
    int64_t integer;
  };
};

// Of an entry's circumstances: recorded in no_grad or inference mode, or of integers alone, and not by a backward pass,
// while sizes are padded.
constexpr uint64_t kWithoutGradients = uint64_t{1} << 62;
constexpr uint64_t kInAutocast = uint64_t{1} << 63; // recorded inside torch.autocast

// One op call in flat form.  Reused from call to call.
struct EncodedCall {
  c10::SmallVector<uint64_t, 64> words;
  c10::SmallVector<TensorRef, 8> tensors;
  c10::SmallVector<int64_t, 8> offsets;       // of Box and General views, in order
  c10::SmallVector<RuntimeNumber, 8> numbers; // Runtime and Random, in order
  std::vector<at::Tensor> moved;              // CPU tensors that had to be copied to the device
  at::Generator generator;                    // of a random op: its seed and offset are the last two numbers
  // Bit i: tensor i requires a gradient, in bit 61 all that follow.  It shapes no program by itself,
  // and tells afterwards why there was another one.
  uint64_t circumstances{0};

  void clear() {
    circumstances = 0;
    words.clear();
    tensors.clear();
    offsets.clear();
    numbers.clear();
    moved.clear();
    generator = {};
  }
};

// Raises when an argument cannot be recorded (a CPU tensor with dimensions).
void encode_call(const OpInfo& op, c10::ArrayRef<c10::IValue> args, c10::DeviceIndex device, EncodedCall& call);
void encode_tensor(const at::Tensor& tensor, bool reads, EncodedCall& call);

// Raises PyTorch's error where a number overflows the dtype that it is converted to.
void check_number(const at::Scalar& number, c10::ScalarType dtype);
void check_numbers(const Signature& signature, const EncodedCall& call);

// The interned signature, or null if this form of the op has not been seen.
const Signature* find_signature(const EncodedCall& call);

// Infers outputs with PyTorch's own meta kernels, raising their errors, and asks the lowering whether it can express
// this form.  Not to be called under the recorder's lock.
const Signature* make_signature(const OpInfo& op, c10::ArrayRef<c10::IValue> args, const EncodedCall& call);

// The tensor an output is written to; undefined for a new one.
at::Tensor written_tensor(const OutputInfo& output, c10::ArrayRef<c10::IValue> args);

// A signature of the device's own: one output of this layout.
const Signature* builtin_signature(uint32_t builtin_op, const EncodedCall& call, const Layout* output);

// Ids of the device's own entries, above every ATen op's.
constexpr uint32_t kBuiltinZeros = 0xffff0000;  // a buffer read before it was written
constexpr uint32_t kBuiltinResize = 0xffff0001; // a storage that grew or shrank

const Signature& signature_by_id(uint32_t id);
const std::string& interned_string(uint64_t id);

} // namespace tpu
