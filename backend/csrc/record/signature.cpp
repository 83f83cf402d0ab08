#include "record/signature.h"

#include "device/device.h"
#include "launch/program.h"
#include "python_error.h"
#include "record/meta_call.h"

#include <ATen/Dispatch_v2.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/OpMathType.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/List.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros.h>

#include <c10/util/strides.h>

#include <pybind11/pybind11.h>

#include <algorithm>
#include <deque>
#include <mutex>
#include <unordered_map>

namespace tpu {
namespace {

struct SignatureTable {
  std::mutex mutex;
  std::deque<Signature> signatures;
  std::unordered_multimap<uint64_t, const Signature*> by_hash;
};
SignatureTable& table() {
  static auto* instance = new SignatureTable;
  return *instance;
}

uint64_t hash_of(c10::ArrayRef<uint64_t> words) {
  uint64_t hash = words.size();
  for (uint64_t word : words) {
    hash = (hash ^ word) * 0x9fb21c651e98df25ULL;
    hash ^= hash >> 29;
  }
  return hash;
}

// A meta tensor of the same shape: PyTorch's shape inference runs on these.
at::Tensor to_meta(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.device().type() != kDeviceType) {
    return tensor;
  }
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(c10::kMeta));
}

c10::IValue to_meta(const c10::IValue& value) {
  if (value.isTensor()) {
    return to_meta(value.toTensor());
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& item : value.toTensorList()) {
      list.push_back(to_meta(item));
    }
    return list;
  }
  if (value.isDevice()) {
    return c10::Device(c10::kMeta);
  }
  if (value.isGenerator()) {
    return {};
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& item : value.toOptionalTensorList()) {
      if (!item.has_value()) {
        list.push_back(std::nullopt);
      } else if (item->is_cpu()) {
        list.push_back(at::empty_strided(item->sizes(), item->strides(), item->options().device(c10::kMeta)));
      } else {
        list.push_back(to_meta(*item));
      }
    }
    return list;
  }
  return value;
}

// Whether a meta kernel refuses the arguments.  Then the CPU's kernel is asked: it says what is wrong in
// the words that PyTorch's users know, and where it finds nothing wrong it has the result.
template <class Function>
bool is_refused(const OpInfo& op, Function&& ask_meta) {
  const bool is_own = !op.handle.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU);
  try {
    ask_meta();
  } catch (const c10::Error&) {
    if (is_own) {
      throw;
    }
    return true;
  } catch (pybind11::error_already_set& error) {
    pybind11::gil_scoped_acquire gil;
    if (is_own || is_interrupt(error)) {
      throw;
    }
    return true;
  }
  return false;
}

// The functional overload's arguments out of an in-place or out= call: the same, without the out= ones.
torch::jit::Stack functional_arguments(const OpInfo& op, const torch::jit::Stack& meta) {
  torch::jit::Stack stack;
  for (size_t i = 0; i < meta.size(); ++i) {
    if (op.args[i].is_out) {
      continue;
    }
    stack.push_back(meta[i]);
    if (op.sums_in_out_dtype && op.handle.schema().arguments()[i].name() == "dtype" && meta[i].isNone()) {
      stack.back() = meta.back().toTensor().scalar_type();
    }
  }
  return stack;
}

// Whether the CPU's kernel writes the result into out= tensors of these dtypes, which many a meta kernel does not look
// at.  It is asked with zeros that take no memory; what it computes goes nowhere.
bool cpu_takes_out(const OpInfo& op, const torch::jit::Stack& meta) {
  torch::jit::Stack stack = meta;
  for (size_t i = 0; i < stack.size(); ++i) {
    if (stack[i].isTensorList() || stack[i].isOptionalTensorList() || op.num_draws > 0) {
      return true;
    }
    if (!stack[i].isTensor() || !stack[i].toTensor().defined()) {
      continue;
    }
    const at::Tensor& like = stack[i].toTensor();
    const auto options = like.options().device(c10::kCPU);
    auto made = op.args[i].is_out ? at::empty(like.sizes(), options)
                                  : at::zeros(std::vector<int64_t>(like.dim(), 1), options).expand(like.sizes());
    if (like.unsafeGetTensorImpl()->is_wrapped_number()) {
      made.unsafeGetTensorImpl()->set_wrapped_number(true);
    }
    stack[i] = std::move(made);
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  try {
    op.handle.callBoxed(stack);
  } catch (const c10::Error&) {
    return false;
  }
  return true;
}

// An in-place result is of the shape that it had: some meta kernels of PyTorch's broadcast it.
bool changes_shape(
    const OpInfo& op, c10::ArrayRef<c10::IValue> args, const std::optional<std::vector<MetaTensor>>& returned) {
  return returned.has_value() && std::any_of(returned->begin(), returned->end(), [&](const MetaTensor& item) {
           const int arg = op.returned_arg[item.slot];
           return arg >= 0 && !op.args[arg].is_out && args[arg].isTensor() && item.tensor.defined() &&
               item.tensor.sizes() != args[arg].toTensor().sizes();
         });
}

// The CPU computes in the dtype of both arguments and writes into the first one's.
void keep_first_dtype(std::optional<std::vector<MetaTensor>>& results, c10::ArrayRef<c10::IValue> args) {
  const auto dtype = args[0].toTensor().scalar_type();
  for (MetaTensor& item : *results) {
    TORCH_CHECK(c10::canCast(item.tensor.scalar_type(), dtype));
    item.tensor = item.tensor.to(dtype);
  }
}

// The strides that an out= tensor of another shape gets: those that a new result would have, its inputs' often.
std::vector<int64_t>
resized_strides(const MetaTensor& resized, const std::optional<std::vector<MetaTensor>>& computed) {
  if (computed.has_value()) {
    for (const MetaTensor& item : *computed) {
      if (item.slot == resized.slot && item.tensor.defined() && item.tensor.sizes() == resized.tensor.sizes() &&
          item.tensor.is_non_overlapping_and_dense()) {
        return item.tensor.strides().vec();
      }
    }
  }
  return {};
}

void describe_write(const OpInfo& op, const at::Tensor& target, OutputInfo& output) {
  if (!op.is_fill) {
    at::assert_no_internal_overlap(target);
  }
  output.sizes = target.sizes().vec();
  output.strides = target.strides().vec();
  output.dtype = target.scalar_type();
  output.skip = target.numel() == 0;
  const auto order = memory_order(target.sizes(), target.strides());
  output.partial = !fills_buffer(target, order);
  output.layout = output.partial ? buffer_of(target)->layout : dense_layout(order, target.sizes(), output.dtype);
}

void describe_new(const at::Tensor& meta, OutputInfo& output) {
  if (!meta.defined()) {
    output.undefined = output.skip = true;
    return;
  }
  output.sizes = meta.sizes().vec();
  output.strides = meta.strides().vec();
  output.dtype = meta.scalar_type();
  output.skip = meta.numel() == 0;
  const auto order = memory_order(meta.sizes(), meta.strides());
  if (!order.dense) { // a meta kernel that leaves gaps or overlaps: values would not survive, make it contiguous
    const auto contiguous = c10::contiguous_strides(output.sizes);
    output.strides.assign(contiguous.begin(), contiguous.end());
    output.layout = intern_layout(output.sizes, output.dtype);
    return;
  }
  output.layout = dense_layout(order, meta.sizes(), output.dtype);
}

bool is_wide(const at::Tensor& tensor) {
  return tensor.defined() && tensor.dim() >= 0 &&
      (tensor.scalar_type() == c10::kDouble || tensor.scalar_type() == c10::kComplexDouble) &&
      !tensor.unsafeGetTensorImpl()->is_wrapped_number();
}

// Whether an op computes in integers: what is a float among its numbers must reach them exactly.
bool is_integral(const Signature& signature, c10::ArrayRef<c10::IValue> args) {
  const auto has_fraction = [](const at::Tensor& tensor) {
    return tensor.defined() && tensor.dim() > 0 && !c10::isIntegralType(tensor.scalar_type(), /*includeBool=*/true);
  };
  for (size_t i = 0; i < args.size(); ++i) {
    if (!signature.op->args[i].is_read) {
      continue;
    }
    if (args[i].isTensor() && has_fraction(args[i].toTensor())) {
      return false;
    }
  }
  return std::any_of(signature.outputs.begin(), signature.outputs.end(), [](const OutputInfo& output) {
    return !output.undefined && c10::isIntegralType(output.computed_dtype, /*includeBool=*/true);
  });
}

bool may_overflow(const RuntimeNumber& number, c10::ScalarType dtype) {
  if (dtype == c10::kBool || dtype == c10::kDouble || dtype == c10::kComplexDouble || c10::isFloat8Type(dtype)) {
    return false;
  }
  return !number.is_integer || dtype == c10::kHalf || c10::isIntegralType(dtype, /*includeBool=*/false);
}

// Whether a number of a scatter or a pad becomes no element: there is no index, or nothing is added.
bool is_written_nowhere(const OpInfo& op, c10::ArrayRef<c10::IValue> args) {
  for (size_t i = 0; i < args.size(); ++i) {
    const std::string& name = op.handle.schema().arguments()[i].name();
    if (name == "index") {
      return args[i].toTensor().numel() == 0;
    }
    if (name == "pad") {
      const auto pads = args[i].toIntVector();
      return std::all_of(pads.begin(), pads.end(), [](int64_t pad) { return pad <= 0; });
    }
  }
  return false;
}

// Which of a call's numbers must fit into which dtype.
std::vector<NumberFit>
fits_of(const OpInfo& op, c10::ArrayRef<c10::IValue> args, const std::vector<OutputInfo>& outputs) {
  std::vector<NumberFit> fits;
  if (std::all_of(op.args.begin(), op.args.end(), [](const ArgInfo& arg) { return arg.fits == Fits::Any; })) {
    return fits;
  }
  EncodedCall again; // tells which argument has which numbers
  for (size_t i = 0; i < args.size(); ++i) {
    const size_t first = again.numbers.size();
    encode_value(op.args[i], args[i], 0, again);
    const size_t count = again.numbers.size() - first;
    if (op.args[i].fits == Fits::Any || (op.args[i].fits == Fits::Written && is_written_nowhere(op, args))) {
      continue;
    }
    for (size_t place = 0; place < count; ++place) {
      for (const OutputInfo& output : outputs) {
        if (output.undefined || (count > 1 && output.element != static_cast<int>(place))) {
          continue;
        }
        const auto opmath = at::toOpMathType(output.computed_dtype);
        const auto dtype = op.args[i].fits == Fits::Opmath ? opmath : output.computed_dtype;
        if (op.is_fill && dtype != opmath && c10::multiply_integers(output.sizes) == 1) {
          continue; // PyTorch fills one element of 16 bit without this check
        }
        const NumberFit fit{static_cast<uint32_t>(first + place), dtype};
        if (may_overflow(again.numbers[fit.number], dtype) && std::find(fits.begin(), fits.end(), fit) == fits.end()) {
          fits.push_back(fit);
        }
      }
    }
  }
  return fits;
}

// Whether a complex number, which is part of the form, is given where there are only real ones.
bool loses_imaginary_part(const OpInfo& op, c10::ArrayRef<c10::IValue> args, const std::vector<OutputInfo>& outputs) {
  const bool is_real = std::all_of(outputs.begin(), outputs.end(), [](const OutputInfo& output) {
    return !c10::isComplexType(output.computed_dtype);
  });
  for (size_t i = 0; is_real && i < args.size(); ++i) {
    if (op.args[i].fits != Fits::Any && args[i].isComplexDouble() && args[i].toComplexDouble().imag() != 0) {
      return true;
    }
  }
  return false;
}

// Gives it its number; nobody finds it yet.
Signature* store(Signature signature) {
  auto& t = table();
  std::lock_guard<std::mutex> guard(t.mutex);
  signature.id = static_cast<uint32_t>(t.signatures.size());
  t.signatures.push_back(std::move(signature));
  return &t.signatures.back();
}

const Signature* find(c10::ArrayRef<uint64_t> words, uint64_t hash) { // under the table's lock
  auto range = table().by_hash.equal_range(hash);
  for (auto it = range.first; it != range.second; ++it) {
    if (words == c10::ArrayRef<uint64_t>(it->second->words)) {
      return it->second;
    }
  }
  return nullptr;
}

// Lets others find it, now that all is known of it; the one that another thread was faster with, if there is one.
const Signature* publish(const Signature* signature) {
  auto& t = table();
  const uint64_t hash = hash_of(signature->words);
  std::lock_guard<std::mutex> guard(t.mutex);
  if (const Signature* known = find(signature->words, hash)) {
    return known;
  }
  t.by_hash.emplace(hash, signature);
  return signature;
}

// Whether a tensor that is to be written is on another device (a 0-d CPU tensor would be taken for a number).
bool writes_elsewhere(const OpInfo& op, c10::ArrayRef<c10::IValue> args) {
  const auto is_elsewhere = [](const at::Tensor& tensor) {
    return tensor.defined() && tensor.device().type() != kDeviceType;
  };
  for (size_t i = 0; i < args.size(); ++i) {
    if (!op.args[i].is_written) {
      continue;
    }
    if (args[i].isTensor() && is_elsewhere(args[i].toTensor())) {
      return true;
    }
    if (args[i].isTensorList()) {
      for (const at::Tensor& item : args[i].toTensorList()) {
        if (is_elsewhere(item)) {
          return true;
        }
      }
    }
  }
  return false;
}

// Asks Python to trace the lowering of this form once.  Where that fails the arguments may be wrong, which the CPU's
// kernel will say.  Returns whether the answer is one for good: what has failed for want of memory, say, is asked anew.
bool trace_form(Signature& signature) {
  pybind11::gil_scoped_acquire gil;
  auto answer = pybind11::reinterpret_steal<pybind11::object>(
      PyObject_CallFunction(runtime().trace_form, "I", static_cast<unsigned int>(signature.id)));
  if (!answer) {
    pybind11::error_already_set error;
    if (is_interrupt(error)) {
      throw error;
    }
    signature.on_cpu = true;
    signature.lowering_failure = pybind11::str(error.value());
    return pybind11::getattr(error.value(), "is_final", pybind11::bool_(false)).cast<bool>();
  }
  const auto [is_lowered, checked, reads_precision] = answer.cast<std::tuple<bool, bool, bool>>();
  signature.on_cpu = !is_lowered;
  signature.checked = checked;
  signature.reads_precision = reads_precision;
  return true;
}

} // namespace

void check_number(const at::Scalar& number, c10::ScalarType dtype) {
  if (c10::isFloat8Type(dtype)) {
    return;
  }
  AT_DISPATCH_V2(
      dtype,
      "check_number",
      AT_WRAP([&] { std::ignore = number.to<scalar_t>(); }),
      AT_EXPAND(AT_ALL_TYPES_AND_COMPLEX),
      AT_EXPAND(AT_BAREBONES_UNSIGNED_TYPES),
      c10::kComplexHalf,
      c10::kHalf,
      c10::kBFloat16,
      c10::kBool);
}

void check_numbers(const Signature& signature, const EncodedCall& call) {
  for (const auto& [place, dtype] : signature.fits) {
    const auto& number = call.numbers[place];
    check_number(number.is_integer ? at::Scalar(number.integer) : at::Scalar(number.real), dtype);
  }
}

const Signature* find_signature(const EncodedCall& call) {
  auto& t = table();
  const c10::ArrayRef<uint64_t> words(call.words.data(), call.words.size());
  const uint64_t hash = hash_of(words);
  std::lock_guard<std::mutex> guard(t.mutex);
  return find(words, hash);
}

const Signature* make_signature(const OpInfo& op, c10::ArrayRef<c10::IValue> args, const EncodedCall& call) {
  Signature signature;
  signature.op = &op;
  signature.words = {call.words.begin(), call.words.end()};
  torch::jit::Stack meta;
  for (const auto& value : args) {
    if (value.isTensor()) {
      signature.wide |= is_wide(value.toTensor());
    } else if (value.isTensorList()) {
      for (const at::Tensor& item : value.toTensorList()) {
        signature.wide |= is_wide(item);
      }
    }
    meta.push_back(to_meta(value));
  }

  if (writes_elsewhere(op, args)) {
    TORCH_CHECK(
        op.has_parts, "Expected all tensors to be on the same device, but found at least two devices, tpu:0 and cpu!");
    signature.by_parts = true;
    return publish(store(std::move(signature)));
  }
  const auto before = meta;
  std::optional<std::vector<MetaTensor>> returned;
  std::optional<std::vector<MetaTensor>> computed; // before it is written anywhere
  const bool refused = is_refused(op, [&] {
    returned = call_meta(op.handle, meta);
    computed = op.functional.has_value() ? call_meta(*op.functional, functional_arguments(op, before)) : returned;
    if (op.keeps_first_dtype && returned.has_value()) {
      keep_first_dtype(returned, args);
      keep_first_dtype(computed, args);
    }
    TORCH_CHECK(!changes_shape(op, args, returned));
  });
  const bool returns_new = std::any_of(op.returned_arg.begin(), op.returned_arg.end(), [](int arg) { return arg < 0; });
  if (refused) {
    // What is wrong may be a number, which is no part of the form: the next call is asked anew.
    static const auto* const refusal = [] {
      auto* made = new Signature;
      made->on_cpu = true;
      return made;
    }();
    return refusal;
  }
  if (!returned.has_value() && returns_new) {
    signature.on_cpu = true; // nobody can say what comes out: the CPU's kernel will
    return publish(store(std::move(signature)));
  }

  bool casts_out = false;  // what is computed is of another dtype than out=
  bool loses_kind = false; // of the number: a complex one into floats, a float into integers
  const auto add_output = [&](OutputInfo output, const at::Tensor& result) {
    const auto place = signature.outputs.size();
    const at::Tensor target = written_tensor(output, args);
    if (target.defined()) {
      describe_write(op, target, output);
    } else {
      describe_new(result, output);
    }
    const bool known = computed.has_value() && place < computed->size() && (*computed)[place].tensor.defined();
    if (known) {
      output.computed_sizes = op.keeps_shape_of_out ? output.sizes : (*computed)[place].tensor.sizes().vec();
      output.computed_dtype = (*computed)[place].tensor.scalar_type();
      signature.wide |= is_wide((*computed)[place].tensor);
    } else {
      output.computed_sizes = output.sizes;
      output.computed_dtype = output.dtype;
    }
    casts_out |= output.written_arg >= 0 && op.args[output.written_arg].is_out && output.computed_dtype != output.dtype;
    const bool is_in_place = output.written_arg >= 0 && !op.args[output.written_arg].is_out;
    loses_kind |= (op.is_pointwise || is_in_place) && !c10::canCast(output.computed_dtype, output.dtype);
    signature.outputs.push_back(std::move(output));
  };
  const auto add_written = [&](int arg, int slot) {
    const auto& value = args[arg];
    const int written_with = op.args[arg].written_with;
    const bool stays = written_with >= 0 && args[written_with].isNone();
    if (value.isTensorList()) {
      for (size_t i = 0; i < value.toTensorList().size(); ++i) {
        OutputInfo output;
        output.written_arg = arg;
        output.element = static_cast<int>(i);
        output.return_slot = slot;
        add_output(std::move(output), {});
        signature.outputs.back().skip |= stays;
      }
    } else if (value.isTensor() && value.toTensor().defined()) {
      OutputInfo output;
      output.written_arg = arg;
      output.return_slot = slot;
      add_output(std::move(output), {});
    }
  };
  for (size_t slot = 0; slot < op.returned_arg.size(); ++slot) {
    if (op.returned_arg[slot] >= 0) {
      const int arg = op.returned_arg[slot];
      // An operator without a meta kernel for its out= overload has one for the other.
      const auto& shapes = returned.has_value() || !op.args[arg].is_out ? returned : computed;
      if (shapes.has_value() && args[arg].isTensor()) {
        for (const auto& item : *shapes) {
          if (item.slot != static_cast<int>(slot) || !item.tensor.defined()) {
            continue;
          }
          const at::Tensor& out = args[arg].toTensor();
          const bool fits =
              op.keeps_shape_of_out ? item.tensor.numel() == out.numel() : item.tensor.sizes() == out.sizes();
          if (!fits) {
            signature.out_resizes.push_back({arg, item.tensor.sizes().vec(), resized_strides(item, computed)});
          }
        }
      }
      add_written(arg, static_cast<int>(slot));
      continue;
    }
    for (const auto& item : *returned) {
      if (item.slot == static_cast<int>(slot)) {
        OutputInfo output;
        output.element = item.element;
        output.return_slot = static_cast<int>(slot);
        add_output(std::move(output), item.tensor);
      }
    }
  }
  for (int arg : op.silently_written) {
    add_written(arg, -1);
  }
  signature.wide |= is_integral(signature, args);
  signature.fits = fits_of(op, args, signature.outputs);
  loses_kind |= loses_imaginary_part(op, args, signature.outputs);
  if (loses_kind || (casts_out && !cpu_takes_out(op, before))) { // let pass by meta kernels, refused by PyTorch
    signature.on_cpu = true;
    return publish(store(std::move(signature)));
  }
  Signature* stored = store(std::move(signature));
  const bool is_final = !stored->out_resizes.empty() || trace_form(*stored);
  return is_final ? publish(stored) : stored;
}

at::Tensor written_tensor(const OutputInfo& output, c10::ArrayRef<c10::IValue> args) {
  if (output.written_arg < 0) {
    return {};
  }
  const auto& value = args[output.written_arg];
  return output.element < 0 ? value.toTensor() : value.toTensorList().get(output.element);
}

const Signature* builtin_signature(uint32_t builtin_op, const EncodedCall& call, const Layout* output) {
  if (const Signature* known = find_signature(call)) {
    return known;
  }
  Signature signature;
  signature.words = {call.words.begin(), call.words.end()};
  TORCH_INTERNAL_ASSERT(signature.words[0] == builtin_op);
  OutputInfo info;
  info.sizes = output->dims;
  const auto contiguous = c10::contiguous_strides(output->dims);
  info.strides.assign(contiguous.begin(), contiguous.end());
  info.dtype = output->dtype;
  info.layout = output;
  info.computed_sizes = output->dims;
  info.computed_dtype = output->dtype;
  signature.outputs.push_back(std::move(info));
  return publish(store(std::move(signature)));
}

const Signature& signature_by_id(uint32_t id) {
  auto& t = table();
  std::lock_guard<std::mutex> guard(t.mutex);
  return t.signatures.at(id);
}

} // namespace tpu
