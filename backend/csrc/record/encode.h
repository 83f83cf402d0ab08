// A call of an op in flat form, as words and what travels beside them: tensors, offsets and numbers.  Calls with equal
// words have one signature.
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

// The string of a Tag::String word.
const std::string& interned_string(uint64_t id);

} // namespace tpu
