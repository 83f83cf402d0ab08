#include "record/encode.h"

#include "aten/autocast.h"
#include "device/device.h"

#include <c10/util/strides.h>

#include <algorithm>
#include <bit>
#include <deque>
#include <mutex>
#include <unordered_map>

namespace tpu {
namespace {

// String arguments. What was interned stays.
struct StringTable {
  std::mutex mutex;
  std::deque<std::string> strings;
  std::unordered_map<std::string, uint64_t> ids;
};
StringTable& string_table() {
  static auto* instance = new StringTable;
  return *instance;
}

uint64_t intern_string(const std::string& text) {
  auto& t = string_table();
  std::lock_guard<std::mutex> guard(t.mutex);
  auto [it, inserted] = t.ids.try_emplace(text, t.strings.size());
  if (inserted) {
    t.strings.push_back(text);
  }
  return it->second;
}

void encode_runtime(EncodedCall& call, c10::ScalarType dtype, bool wrapped, RuntimeNumber number) {
  call.words.push_back(tagged(
      Tag::Runtime,
      static_cast<uint64_t>(number.is_integer) | static_cast<uint64_t>(dtype) << 8 |
          static_cast<uint64_t>(wrapped) << 16));
  call.numbers.push_back(number);
}

// A 0-d CPU tensor is a number that PyTorch wrapped (`x * 2.5`), or one the user keeps on the host (Adam's step).
void encode_cpu_scalar(const at::Tensor& tensor, EncodedCall& call) {
  const auto dtype = tensor.scalar_type();
  const bool wrapped = tensor.unsafeGetTensorImpl()->is_wrapped_number();
  if (wrapped && dtype == c10::kDouble) { // nearly every one; `item` is a dispatch of its own
    encode_runtime(call, dtype, wrapped, {.is_integer = false, .real = *tensor.const_data_ptr<double>()});
    return;
  }
  const auto value = tensor.item();
  if (value.isComplex()) {
    const auto number = value.toComplexDouble();
    call.words.push_back(
        tagged(Tag::Complex, static_cast<uint64_t>(dtype) << 8 | static_cast<uint64_t>(wrapped) << 16));
    call.words.push_back(std::bit_cast<uint64_t>(number.real()));
    call.words.push_back(std::bit_cast<uint64_t>(number.imag()));
  } else if (value.isFloatingPoint()) {
    encode_runtime(call, dtype, wrapped, {.is_integer = false, .real = value.toDouble()});
  } else {
    encode_runtime(call, dtype, wrapped, {.is_integer = true, .integer = value.toLong()});
  }
}

void encode_number(const ArgInfo& arg, const c10::IValue& value, EncodedCall& call) {
  const bool is_integer = !value.isDouble();
  const double real = value.isDouble() ? value.toDouble() : static_cast<double>(value.toInt());
  const bool runtime = arg.policy == NumberPolicy::Runtime && !(arg.zero_or_one_static && (real == 0 || real == 1));
  if (runtime) {
    if (is_integer) {
      encode_runtime(call, c10::kLong, true, {.is_integer = true, .integer = value.toInt()});
    } else {
      encode_runtime(call, c10::kDouble, true, {.is_integer = false, .real = real});
    }
  } else if (is_integer) {
    call.words.push_back(tagged(Tag::Int));
    call.words.push_back(static_cast<uint64_t>(value.toInt()));
  } else {
    call.words.push_back(tagged(Tag::Double));
    call.words.push_back(std::bit_cast<uint64_t>(real));
  }
}

// A list of numbers that are the same: one input does for all of them, and what it does to each tensor is one kernel.
bool is_one_number(c10::ArrayRef<c10::IValue> list) {
  return list.size() > 1 && list[0].isDouble() && std::all_of(list.begin(), list.end(), [&](const c10::IValue& item) {
           return item.isDouble() &&
               std::bit_cast<uint64_t>(item.toDouble()) == std::bit_cast<uint64_t>(list[0].toDouble());
         });
}

void encode_any_tensor(const at::Tensor& tensor, bool reads, c10::DeviceIndex device, EncodedCall& call) {
  if (!tensor.defined()) {
    call.words.push_back(tagged(Tag::None));
  } else if (tensor.device().type() == kDeviceType) {
    encode_tensor(tensor, reads, call);
  } else if (tensor.device().is_cpu() && tensor.dim() == 0) {
    encode_cpu_scalar(tensor, call);
  } else {
    TORCH_CHECK(
        false,
        "Expected all tensors to be on the same device, but found at least two devices, tpu:",
        static_cast<int>(device),
        " and ",
        tensor.device(),
        "! Move the other one first: tensor.to(\"tpu\")");
  }
}

void encode_value(const ArgInfo& arg, const c10::IValue& value, c10::DeviceIndex device, EncodedCall& call) {
  if (value.isTensor()) {
    encode_any_tensor(value.toTensor(), arg.is_read, device, call);
  } else if (value.isNone() || value.isDevice() || value.isGenerator()) {
    call.words.push_back(tagged(Tag::None));
  } else if (value.isBool()) {
    call.words.push_back(tagged(Tag::Bool, value.toBool()));
  } else if (value.isInt() || value.isDouble()) {
    encode_number(arg, value, call);
  } else if (value.isSymInt()) {
    encode_number(arg, c10::IValue(value.toSymInt().guard_int(__FILE__, __LINE__)), call);
  } else if (value.isComplexDouble()) {
    const auto number = value.toComplexDouble();
    call.words.push_back(tagged(Tag::Complex, static_cast<uint64_t>(c10::kComplexDouble) << 8 | 1ULL << 16));
    call.words.push_back(std::bit_cast<uint64_t>(number.real()));
    call.words.push_back(std::bit_cast<uint64_t>(number.imag()));
  } else if (value.isIntList() && arg.policy == NumberPolicy::Runtime) {
    const auto& list = value.toIntList();
    call.words.push_back(tagged(Tag::List, list.size()));
    for (int64_t item : list) {
      encode_number(arg, item, call);
    }
  } else if (value.isIntList()) {
    const auto& list = value.toIntList();
    call.words.push_back(tagged(Tag::IntList, list.size()));
    for (int64_t item : list) {
      call.words.push_back(static_cast<uint64_t>(item));
    }
  } else if (value.isDoubleList()) {
    const auto& list = value.toDoubleList();
    call.words.push_back(tagged(Tag::DoubleList, list.size()));
    for (double item : list) {
      call.words.push_back(std::bit_cast<uint64_t>(item));
    }
  } else if (value.isBoolList()) {
    const auto& list = value.toBoolList();
    call.words.push_back(tagged(Tag::BoolList, list.size()));
    for (bool item : list) {
      call.words.push_back(static_cast<uint64_t>(item));
    }
  } else if (value.isString()) {
    call.words.push_back(tagged(Tag::String, intern_string(value.toStringRef())));
  } else if (value.isTensorList()) {
    const auto& list = value.toTensorList();
    call.words.push_back(tagged(Tag::List, list.size()));
    for (const at::Tensor& item : list) {
      encode_any_tensor(item, arg.is_read, device, call);
    }
  } else if (value.isList()) { // Tensor?[] of index, SymInt[], Scalar[]
    const auto list = value.toListRef();
    if (arg.policy == NumberPolicy::Runtime && is_one_number(list)) {
      call.words.push_back(tagged(Tag::Repeated, list.size()));
      encode_number(arg, list[0], call);
      return;
    }
    call.words.push_back(tagged(Tag::List, list.size()));
    for (const c10::IValue& item : list) {
      if (item.isTensor() && item.toTensor().defined() && item.toTensor().is_cpu() && item.toTensor().dim() > 0) {
        // PyTorch allows CPU index tensors beside a device tensor.
        call.moved.push_back(item.toTensor().to(c10::Device(kDeviceType, device)));
        encode_tensor(call.moved.back(), true, call);
      } else {
        encode_value(arg, item, device, call);
      }
    }
  } else {
    TORCH_CHECK(false, "an argument of type ", value.tagKind(), " cannot be recorded on tpu");
  }
}

} // namespace

void encode_tensor(const at::Tensor& tensor, bool reads, EncodedCall& call) {
  Buffer* buffer = buffer_of(tensor);
  const Layout* layout = buffer->layout;
  const auto* impl = tensor.unsafeGetTensorImpl();
  const auto sizes = impl->sizes();
  const auto dtype = c10::typeMetaToScalarType(impl->dtype());
  if (impl->requires_grad()) {
    call.circumstances |= uint64_t{1} << std::min<size_t>(call.tensors.size(), 61);
  }
  call.tensors.push_back({buffer, reads});
  if (impl->storage_offset() == 0 && impl->is_contiguous() && dtype == layout->dtype && sizes == layout->dims) {
    call.words.push_back(tagged(Tag::TensorWhole, layout->id));
    return;
  }
  const auto strides = impl->strides();
  const auto itemsize = impl->itemsize();
  const auto capacity = static_cast<int64_t>(layout->nbytes() / itemsize);
  ViewKind kind = ViewKind::General;
  if (impl->storage_offset() == 0 && impl->numel() == capacity && memory_order(sizes, strides).dense) {
    kind = ViewKind::Dense;
  } else {
    if (dtype == layout->dtype && is_box(layout->dims, sizes, strides, impl->storage_offset())) {
      kind = ViewKind::Box;
    }
    call.offsets.push_back(impl->storage_offset());
  }
  call.words.push_back(tagged(
      Tag::TensorView,
      sizes.size() | static_cast<uint64_t>(kind) << 8 | static_cast<uint64_t>(dtype) << 16 |
          static_cast<uint64_t>(layout->id) << 24));
  for (int64_t size : sizes) {
    call.words.push_back(static_cast<uint64_t>(size));
  }
  for (int64_t stride : strides) {
    call.words.push_back(static_cast<uint64_t>(stride));
  }
}

void encode_call(const OpInfo& op, c10::ArrayRef<c10::IValue> args, c10::DeviceIndex device, EncodedCall& call) {
  if (in_autocast()) {
    call.circumstances |= kInAutocast;
  }
  call.words.push_back(first_word(op.id, at::get_default_dtype_as_scalartype()));
  for (size_t i = 0; i < args.size(); ++i) {
    encode_value(op.args[i], args[i], device, call);
  }
  if (op.num_draws > 0) {
    call.words.push_back(tagged(Tag::Random));
  }
}

const std::string& interned_string(uint64_t id) {
  auto& t = string_table();
  std::lock_guard<std::mutex> guard(t.mutex);
  return t.strings.at(id);
}

} // namespace tpu
