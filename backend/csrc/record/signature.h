// A signature is everything about one recorded op that shapes its program: the overload, the geometry of each tensor,
// static arguments.  It is a flat run of words, interned, so that the stream holds one number an op.
#pragma once

#include "record/encode.h"
#include "record/op.h"
#include "record/value.h"

namespace tpu {

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
  bool skip{false}; // nothing is written: it has no elements, or stays as it is
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

} // namespace tpu
