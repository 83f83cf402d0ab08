// The few ATen kernels that are about storage and not about numbers: making, viewing, resizing, copying, reading.
#include "device/device.h"
#include "python_error.h"
#include "record/settings.h"

#include <ATen/ExpandUtils.h>
#include <ATen/Functions.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/NativeFunctions.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorFactories.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/library.h>

namespace py = pybind11;

namespace tpu {
namespace {

c10::DeviceIndex index_of(std::optional<c10::Device> device) {
  return Device::get().find(device.has_value() ? device->index() : c10::DeviceIndex{-1});
}

c10::DimVector concrete_sizes(c10::SymIntArrayRef sizes) {
  c10::DimVector result;
  for (const auto& size : sizes) {
    result.push_back(size.guard_int(__FILE__, __LINE__));
    TORCH_CHECK(result.back() >= 0, "Trying to create tensor with negative dimension ", result.back(), ": ", sizes);
  }
  return result;
}

// An empty tensor as PyTorch gives it out.
at::Tensor without_chance(at::Tensor tensor) {
  return fills_uninitialized() ? at::native::fill_empty_deterministic_(tensor) : tensor;
}

at::Tensor empty_memory_format(
    c10::SymIntArrayRef size,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout> layout,
    std::optional<at::Device> device,
    std::optional<bool>,
    std::optional<at::MemoryFormat> memory_format) {
  TORCH_CHECK(layout.value_or(at::kStrided) == at::kStrided, "tpu tensors are strided or sparse, not ", *layout);
  Device::get().ensure_initialized();
  const auto sizes = concrete_sizes(size);
  const auto format = memory_format.value_or(at::MemoryFormat::Contiguous);
  TORCH_CHECK(
      (format != at::MemoryFormat::ChannelsLast || sizes.size() == 4) &&
          (format != at::MemoryFormat::ChannelsLast3d || sizes.size() == 5),
      "required rank ",
      format == at::MemoryFormat::ChannelsLast ? 4 : 5,
      " tensor to use ",
      format == at::MemoryFormat::ChannelsLast ? "channels_last" : "channels_last_3d",
      " format");
  auto strides = c10::contiguous_strides(sizes);
  if (format == at::MemoryFormat::ChannelsLast || format == at::MemoryFormat::ChannelsLast3d) {
    const auto last = format == at::MemoryFormat::ChannelsLast ? c10::get_channels_last_strides_2d(sizes)
                                                               : c10::get_channels_last_strides_3d(sizes);
    strides.assign(last.begin(), last.end());
  }
  return without_chance(
      make_tensor(sizes, strides, dtype.value_or(at::get_default_dtype_as_scalartype()), index_of(device)));
}

at::Tensor empty_strided(
    c10::SymIntArrayRef size,
    c10::SymIntArrayRef stride,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<at::Device> device,
    std::optional<bool>) {
  Device::get().ensure_initialized();
  return without_chance(make_tensor(
      concrete_sizes(size),
      C10_AS_INTARRAYREF_SLOW(stride),
      dtype.value_or(at::get_default_dtype_as_scalartype()),
      index_of(device)));
}

const at::Tensor&
resize_(const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> memory_format) {
  const auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  if (self.sizes() == sizes && !memory_format.has_value()) {
    return self;
  }
  auto* impl = self.unsafeGetTensorImpl();
  const auto needed = at::detail::computeStorageNbytesContiguous(sizes, impl->itemsize(), impl->storage_offset());
  const auto before = impl->unsafe_storage().nbytes();
  if (needed > before) {
    at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(impl->unsafe_storage(), needed);
  }
  impl->set_sizes_contiguous(sizes);
  if (memory_format.has_value() && *memory_format != at::MemoryFormat::Contiguous) {
    impl->empty_tensor_restride(*memory_format);
  }
  if (fills_uninitialized()) {
    at::native::fill_resize_deterministic_(self, static_cast<int64_t>(before));
  }
  return self;
}

at::Tensor read_to_host(const at::Tensor& source);
void write_from_host(const at::Tensor& source, const at::Tensor& target);

// torch.load moves storages as bytes, and makes tensors over them.  Left so, whatever uses one is another program than
// for a tensor that was computed, and one again after the first write.  So the first tensor that is all of such a
// storage gives it its layout.
void lay_out_bytes(const at::Tensor& self) {
  Buffer* buffer = buffer_of(self);
  {
    StreamLock lock(Device::get().stream(buffer->device).mutex());
    const bool are_bytes_of_host = buffer->value && buffer->value->array != nullptr && buffer->value->launch == 0 &&
        buffer->layout->dtype == at::kByte && buffer->layout->dims.size() == 1;
    if (!are_bytes_of_host || self.scalar_type() == at::kByte ||
        !fills_buffer(self, memory_order(self.sizes(), self.strides()))) {
      return;
    }
  }
  write_from_host(read_to_host(self), self);
}

at::Tensor& set_storage(
    at::Tensor& self, at::Storage source, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  at::native::set_storage_cpu_(
      self,
      std::move(source),
      offset.guard_int(__FILE__, __LINE__),
      C10_AS_INTARRAYREF_SLOW(size),
      C10_AS_INTARRAYREF_SLOW(stride));
  lay_out_bytes(self);
  return self;
}

at::Tensor& set_source_storage(at::Tensor& self, at::Storage source) {
  const auto count = static_cast<int64_t>(source.nbytes() / self.itemsize());
  return at::native::set_storage_cpu_(self, std::move(source), 0, {count}, {});
}

at::Tensor& set_source_tensor(at::Tensor& self, const at::Tensor& source) {
  return at::native::set_tensor_(self, source);
}

at::Tensor& set_empty(at::Tensor& self) {
  auto fresh = make_tensor({0}, {1}, self.scalar_type(), self.device().index());
  return at::native::set_tensor_(self, fresh);
}

// In the words of the CPU's copy.
void check_broadcasts(const at::Tensor& source, const at::Tensor& target) {
  const auto broadcast = at::infer_size(target.sizes(), source.sizes());
  TORCH_CHECK(
      target.sizes() == broadcast,
      "output with shape ",
      target.sizes(),
      " doesn't match the broadcast shape ",
      at::IntArrayRef(broadcast));
}

// Host tensor -> a fresh device array in the destination's memory order.
void write_from_host(const at::Tensor& source, const at::Tensor& target) {
  Device::get().ensure_initialized(); // raises in a forked process
  Buffer* buffer = buffer_of(target);
  auto& stream = Device::get().stream(buffer->device);
  const auto order = memory_order(target.sizes(), target.strides());
  check_broadcasts(source, target);
  const auto expanded = source.expand(target.sizes());
  if (!fills_buffer(target, order)) {
    auto staged = make_tensor(
        target.sizes(), c10::contiguous_strides(target.sizes()), target.scalar_type(), target.device().index());
    write_from_host(expanded, staged);
    target.copy_(staged);
    return;
  }
  auto host = expanded.permute(order.permutation).to(target.scalar_type()).contiguous();
  const Layout* layout = intern_layout(host.sizes(), target.scalar_type());
  PyObject* array = nullptr;
  {
    py::gil_scoped_acquire gil;
    drain_released_references(); // else filling a model would keep all that it replaces up to the next launch
    auto tensor = py::reinterpret_steal<py::object>(THPVariable_Wrap(host));
    array = PyObject_CallFunction(runtime().put, "Oi", tensor.ptr(), static_cast<int>(buffer->device));
    if (array == nullptr) {
      throw_python_error();
    }
  }
  StreamLock lock(stream.mutex());
  stream.overwrite(buffer, layout, array);
}

// A small part of a large buffer is copied on the device first: all of it would travel.
constexpr size_t kLargeBuffer = 1 << 20;

at::Tensor read_to_host(const at::Tensor& source) {
  Buffer* buffer = buffer_of(source);
  if (buffer->nbytes > kLargeBuffer && 8 * source.nbytes() < buffer->nbytes) {
    return read_to_host(source.clone(at::MemoryFormat::Contiguous));
  }
  auto& stream = Device::get().stream(buffer->device);
  ValuePtr value; // held by us: nobody donates it while it is read
  std::shared_ptr<PyObject> launch;
  {
    StreamLock lock(stream.mutex());
    stream.note_host_read();
    value = stream.concrete(buffer);
    if (!value) {
      return at::zeros(source.sizes(), source.options().device(at::kCPU));
    }
    launch = stream.token_of(value->launch);
  }
  py::gil_scoped_acquire gil;
  py::object host = py::reinterpret_steal<py::object>(PyObject_CallFunction(
      runtime().get, "OiO", value->array, static_cast<int>(value->layout->dtype), launch ? launch.get() : Py_None));
  if (!host) {
    throw_python_error();
  }
  stream.raise_range_errors(value->launch);
  at::Tensor flat = THPVariable_Unpack(host.ptr()).reshape({-1});
  if (source.scalar_type() != flat.scalar_type()) {
    flat = flat.view(source.scalar_type());
  }
  return flat.as_strided(source.sizes(), source.strides(), source.storage_offset());
}

// A whole-buffer copy between tensors of one dtype and memory order shares the value: values never change.
bool share_value(const at::Tensor& source, const at::Tensor& target) {
  if (source.scalar_type() != target.scalar_type() || source.sizes() != target.sizes() ||
      source.strides() != target.strides() || source.storage_offset() != 0 || target.storage_offset() != 0) {
    return false;
  }
  Buffer* from = buffer_of(source);
  Buffer* to = buffer_of(target);
  const auto nbytes = static_cast<size_t>(source.numel()) * source.element_size();
  auto& stream = Device::get().stream(from->device);
  StreamLock lock(stream.mutex());
  if (from->device != to->device || !from->value || from->layout->nbytes() != nbytes ||
      to->layout->nbytes() != nbytes || !memory_order(source.sizes(), source.strides()).dense) {
    return false;
  }
  stream.share(from, to);
  return true;
}

at::Tensor without_lazy_bits(const at::Tensor& self) {
  const at::Tensor plain = self.is_conj() ? at::_conj(self) : self;
  return plain.is_neg() ? at::_neg_view(plain) : plain;
}

// A copy is what resolves the lazy bits of conj() and of its imaginary part, so they arrive here unresolved.
at::Tensor copy_from(const at::Tensor& self, const at::Tensor& dst, bool non_blocking) {
  if (dst.numel() == 0) {
    return dst;
  }
  if (self.is_conj() || self.is_neg() || dst.is_conj() || dst.is_neg()) {
    at::Tensor value = without_lazy_bits(self);
    if (self.is_conj() != dst.is_conj()) {
      value = at::conj_physical(value);
    }
    if (self.is_neg() != dst.is_neg()) {
      value = at::neg(value);
    }
    copy_from(value, without_lazy_bits(dst), non_blocking);
    return dst;
  }
  if (self.device().type() != kDeviceType) {
    write_from_host(self, dst);
    return dst;
  }
  if (dst.device().type() != kDeviceType) {
    dst.copy_(read_to_host(self));
    return dst;
  }
  if (self.device() != dst.device()) {
    write_from_host(read_to_host(self), dst);
    return dst;
  }
  at::assert_no_partial_overlap(dst, self);
  if (share_value(self, dst)) {
    return dst;
  }
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("tpu::copy", "")
                             .typed<at::Tensor&(const at::Tensor&, at::Tensor&)>();
  at::Tensor target = dst;
  op.call(self, target);
  return dst;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& dst) {
  if (self.sizes() != dst.sizes()) {
    dst.resize_(self.sizes());
  }
  return copy_from(self, dst, false);
}

at::Scalar local_scalar_dense(const at::Tensor& self) {
  TORCH_CHECK(self.numel() == 1, "a Tensor with ", self.numel(), " elements cannot be converted to Scalar");
  return read_to_host(self).item();
}

void refuse_quantized(const c10::OperatorHandle& op, torch::jit::Stack*) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      false,
      op.operator_name(),
      ": tpu tensors are not quantized; keep quantized ones on the CPU, or call dequantize() first");
}

at::Tensor& copy_meta(const at::Tensor& source, at::Tensor& out) {
  check_broadcasts(source, out);
  return out;
}

// `.data =` may turn a CPU tensor into a tpu tensor and back, as it may between the CPU and CUDA.  So
// `module.to("tpu")` keeps its Parameters: tied weights stay tied, and an optimizer that was made before keeps what it
// optimizes.
bool has_compatible_shallow_copy_type(const at::Tensor& self, const at::Tensor& from) {
  const auto is_plain = [](const at::Tensor& tensor) {
    return (tensor.is_cpu() || tensor.device().type() == kDeviceType) &&
        tensor.key_set().has_any(c10::DispatchKeySet(c10::DispatchKey::Dense)) &&
        !tensor.key_set().has(c10::DispatchKey::Python);
  };
  return self.key_set() == from.key_set() || (is_plain(self) && is_plain(from));
}

// There is one stream a device, so memory is never used again too early.
void record_stream(at::Tensor&, at::Stream) {}

bool equal(const at::Tensor& self, const at::Tensor& other) {
  if (self.sizes() != other.sizes()) {
    return false;
  }
  return self.eq(other).all().item().toBool();
}

} // namespace
} // namespace tpu

namespace {

TORCH_LIBRARY(tpu, m) {
  // A device-to-device copy: `out` takes the values of `source`, broadcast and cast.
  m.def("copy(Tensor source, *, Tensor(a!) out) -> Tensor(a!)");
}

TORCH_LIBRARY_IMPL(_, QuantizedPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&tpu::refuse_quantized>());
}

TORCH_LIBRARY_IMPL(tpu, Meta, m) {
  m.impl("copy", &tpu::copy_meta);
}

// PyTorch would resolve the bits with a copy, and that one's with a copy, without end.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &tpu::empty_memory_format);
  m.impl("empty_strided", &tpu::empty_strided);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("view_as_real", &at::native::view_as_real);
  m.impl("view_as_complex", &at::native::view_as_complex);
  m.impl("resize_", &tpu::resize_);
  m.impl("set_", &tpu::set_empty);
  m.impl("set_.source_Tensor", &tpu::set_source_tensor);
  m.impl("set_.source_Storage", &tpu::set_source_storage);
  m.impl("set_.source_Storage_storage_offset", &tpu::set_storage);
  m.impl("_copy_from", &tpu::copy_from);
  m.impl("_copy_from_and_resize", &tpu::copy_from_and_resize);
  m.impl("_local_scalar_dense", &tpu::local_scalar_dense);
  m.impl("equal", &tpu::equal);
  m.impl("_has_compatible_shallow_copy_type", &tpu::has_compatible_shallow_copy_type);
  m.impl("record_stream", &tpu::record_stream);
}

} // namespace
