#include "record/value.h"

#include <ATen/EmptyTensor.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <atomic>
#include <mutex>
#include <utility>
#include <vector>

namespace tpu {
namespace {

constexpr size_t kMaxDevices = 64;

struct AtomicCounters {
  std::atomic<int64_t> current{0};
  std::atomic<int64_t> peak{0};
  std::atomic<int64_t> allocations{0};
};
std::array<AtomicCounters, kMaxDevices> g_counters;

// Addresses are handed out once and never again: far above user space, so that a stray dereference faults.
std::atomic<uintptr_t> g_next_address{uintptr_t{1} << 56};

struct ReleaseQueue {
  std::mutex mutex;
  std::vector<PyObject*> objects;
};
ReleaseQueue& release_queue() {
  static auto* queue = new ReleaseQueue; // never destroyed: tensors may die after static destruction began
  return *queue;
}

// Every buffer that lives: an error that says the memory is full also says of what.
struct LiveList {
  std::mutex mutex;
  Buffer* first{nullptr};
};
LiveList& live_list() {
  static auto* list = new LiveList;
  return *list;
}

bool interpreter_is_going() {
#if PY_VERSION_HEX >= 0x030d0000
  return !Py_IsInitialized() || Py_IsFinalizing();
#else
  return !Py_IsInitialized() || _Py_IsFinalizing();
#endif
}

void free_buffer(void* context) {
  auto* buffer = static_cast<Buffer*>(context);
  g_counters[buffer->device].current.fetch_sub(static_cast<int64_t>(buffer->nbytes), std::memory_order_relaxed);
  {
    auto& list = live_list();
    std::lock_guard<std::mutex> guard(list.mutex);
    (buffer->previous != nullptr ? buffer->previous->next : list.first) = buffer->next;
    if (buffer->next != nullptr) {
      buffer->next->previous = buffer->previous;
    }
  }
  if (buffer->handle) {
    buffer->handle->buffer.store(nullptr, std::memory_order_release);
  }
  delete buffer;
}

class TpuAllocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t nbytes) override {
    auto device = c10::impl::getDeviceGuardImpl(c10::DeviceType::PrivateUse1)->getDevice().index();
    const auto count = static_cast<int64_t>(nbytes);
    return make_buffer(nbytes, intern_layout({count}, c10::kByte), device);
  }
  void copy_data(void*, const void*, size_t) const override {
    TORCH_CHECK(false, "tpu storages cannot be copied byte by byte; use tensor.clone()");
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    c10::CachingDeviceAllocator::DeviceStats stats;
    const auto counters = memory_counters(device);
    constexpr auto kAll = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    // Nothing is held beyond what tensors hold: allocated, reserved and active are one number.
    for (auto* bytes : {&stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes}) {
      (*bytes)[kAll].current = counters.current;
      (*bytes)[kAll].peak = counters.peak;
    }
    stats.allocation[kAll].allocated = counters.allocations;
    return stats;
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override { // (free, total): JAX knows
    pybind11::gil_scoped_acquire gil;
    return pybind11::module_::import("tpu_backend.torch_tpu.memory")
        .attr("mem_get_info")(static_cast<int>(device))
        .cast<std::pair<size_t, size_t>>();
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override { reset_peak_memory(device); }
};

} // namespace

Value::~Value() {
  release_resources();
}

void Value::reset() {
  release_resources();
  segment = 0;
  local = -1;
  launch = 0;
  leased = false;
  error = nullptr;
  in_flight = is_remembered = false;
}

void Value::release_resources() {
  if (array != nullptr) {
    release_reference(std::exchange(array, nullptr));
  }
}

void refuse_address() {
  TORCH_CHECK(
      false,
      "the address of a tpu tensor is a name for it, not memory that can be read; torch.save writes tpu tensors in its "
      "default format only, elsewhere copy to the host first: tensor.cpu()");
}

MemoryCounters memory_counters(c10::DeviceIndex device) {
  auto& counters = g_counters.at(device);
  return {counters.current.load(), counters.peak.load(), counters.allocations.load()};
}

void reset_peak_memory(c10::DeviceIndex device) {
  auto& counters = g_counters.at(device);
  counters.peak.store(counters.current.load());
}

std::vector<LiveBuffer> live_buffers(c10::DeviceIndex device) {
  std::vector<LiveBuffer> buffers;
  for_each_live_buffer(
      device, [&](const Buffer& buffer) { buffers.push_back({buffer.nbytes, buffer.layout, buffer.maker}); });
  return buffers;
}

void for_each_live_buffer(c10::DeviceIndex device, const std::function<void(Buffer&)>& visit) {
  auto& list = live_list();
  std::lock_guard<std::mutex> guard(list.mutex);
  for (Buffer* buffer = list.first; buffer != nullptr; buffer = buffer->next) {
    if (buffer->device == device) {
      visit(*buffer);
    }
  }
}

std::shared_ptr<BufferHandle> handle_of(Buffer& buffer) {
  if (!buffer.handle) {
    buffer.handle = std::make_shared<BufferHandle>(&buffer);
  }
  return buffer.handle;
}

uintptr_t next_address() {
  return g_next_address.load(std::memory_order_relaxed);
}

c10::DataPtr make_buffer(size_t nbytes, const Layout* layout, c10::DeviceIndex device, uint32_t maker) {
  auto& counters = g_counters.at(device);
  const int64_t now = counters.current.fetch_add(static_cast<int64_t>(nbytes), std::memory_order_relaxed) +
      static_cast<int64_t>(nbytes);
  counters.allocations.fetch_add(1, std::memory_order_relaxed);
  int64_t peak = counters.peak.load(std::memory_order_relaxed);
  while (now > peak && !counters.peak.compare_exchange_weak(peak, now, std::memory_order_relaxed)) {
  }
  const uintptr_t address = g_next_address.fetch_add((nbytes + 511) / 512 * 512 + 512, std::memory_order_relaxed);
  auto* buffer = new Buffer{{}, layout, nbytes, address, device, maker, 0, nullptr, nullptr, nullptr};
  {
    auto& list = live_list();
    std::lock_guard<std::mutex> guard(list.mutex);
    buffer->next = list.first;
    if (list.first != nullptr) {
      list.first->previous = buffer;
    }
    list.first = buffer;
  }
  void* data = nbytes == 0 ? nullptr : reinterpret_cast<void*>(address);
  return {data, buffer, &free_buffer, c10::Device(c10::DeviceType::PrivateUse1, device)};
}

c10::Allocator* allocator() {
  static auto* instance = new TpuAllocator;
  return instance;
}

bool fills_buffer(const at::Tensor& tensor, const MemoryOrder& order) {
  return order.dense && tensor.storage_offset() == 0 && tensor.nbytes() == buffer_of(tensor)->layout->nbytes();
}

c10::Storage make_storage(const Layout* layout, c10::DeviceIndex device, uint32_t maker) {
  const auto nbytes = layout->nbytes();
  return c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(),
      nbytes,
      make_buffer(nbytes, layout, device, maker),
      allocator(),
      /*resizable=*/true);
}

at::Tensor tensor_in(
    c10::Storage storage, c10::ScalarType dtype, c10::IntArrayRef sizes, c10::IntArrayRef strides, int64_t offset) {
  auto tensor = at::detail::make_tensor_base<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::scalarTypeToTypeMeta(dtype));
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
  return tensor;
}

at::Tensor
make_tensor(c10::IntArrayRef sizes, c10::IntArrayRef strides, c10::ScalarType dtype, c10::DeviceIndex device) {
  const auto order = memory_order(sizes, strides);
  const auto itemsize = c10::elementSize(dtype);
  const Layout* layout = order.dense
      ? dense_layout(order, sizes, dtype)
      : intern_layout(
            {static_cast<int64_t>(at::detail::computeStorageNbytes(sizes, strides, itemsize) / itemsize)}, dtype);
  return tensor_in(make_storage(layout, device), dtype, sizes, strides);
}

void release_reference(PyObject* object) noexcept {
  if (interpreter_is_going()) {
    return; // the process is ending: leaking is the only safe thing
  }
  if (PyGILState_Check()) {
    Py_DECREF(object);
    return;
  }
  auto& queue = release_queue();
  std::lock_guard<std::mutex> guard(queue.mutex);
  queue.objects.push_back(object);
}

std::shared_ptr<PyObject> shared_reference(PyObject* owned) {
  return {owned, [](PyObject* object) {
            if (object != nullptr) {
              release_reference(object);
            }
          }};
}

void drain_released_references() {
  std::vector<PyObject*> objects;
  {
    auto& queue = release_queue();
    std::lock_guard<std::mutex> guard(queue.mutex);
    objects.swap(queue.objects);
  }
  for (PyObject* object : objects) {
    Py_DECREF(object);
  }
}

} // namespace tpu
