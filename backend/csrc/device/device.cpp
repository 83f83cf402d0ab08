#include "device/device.h"

#include "device/pinned.h"
#include "python_error.h"

#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/GeneratorForPrivateuseone.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <pybind11/pybind11.h>

#include <chrono>
#include <cstdlib>
#include <cstring>

namespace py = pybind11;

namespace tpu {
namespace {

thread_local c10::DeviceIndex t_current = 0;

// One process drives one device.  Known without Python and without starting anything: a CPU-only backward() asks for
// it.
constexpr c10::DeviceIndex kNumDevices = 1;

struct GuardImpl final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kDeviceType; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before(kDeviceType, t_current);
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return {kDeviceType, t_current}; }
  void setDevice(c10::Device device) const override { Device::get().set_current(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    t_current = device.index() < Device::get().count() ? Device::get().find(device.index()) : 0;
  }
  // There is one stream a device; launches on it are ordered, so that stream and event waits hold by themselves.
  c10::Stream getStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, {kDeviceType, Device::get().find(device.index())});
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return getStream(device); }
  c10::Stream getNewStream(c10::Device device, int) const override { return getStream(device); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return getStream(stream.device()); }
  c10::DeviceIndex deviceCount() const noexcept override { return Device::get().count(); }
  // Every dtype that JAX has.
  c10::DeviceCapability getDeviceCapability(c10::Device) const override {
    c10::DeviceCapability capability;
    capability.capability_data.capability_bits = 0;
    auto& has = capability.capability_data.supported_scalar_types;
    has.has_Bool = has.has_Byte = has.has_UInt16 = has.has_UInt32 = has.has_UInt64 = 1;
    has.has_Char = has.has_Short = has.has_Int = has.has_Long = 1;
    has.has_Half = has.has_BFloat16 = has.has_Float = has.has_Double = has.has_ComplexFloat = has.has_ComplexDouble = 1;
    has.has_Float8_e5m2 = has.has_Float8_e4m3fn = has.has_Float8_e5m2fnuz = has.has_Float8_e4m3fnuz = 1;
    return capability;
  }
  bool queryStream(const c10::Stream& stream) const override {
    return Device::get().done(stream.device_index(), Device::get().dispatch(stream.device_index()));
  }
  void synchronizeStream(const c10::Stream& stream) const override { Device::get().synchronize(stream.device_index()); }
  void synchronizeDevice(const c10::DeviceIndex device) const override { Device::get().synchronize(device); }

  // Recording one runs nothing, and asking for it runs what was recorded before it.  Where one takes the time, the
  // launch before it is waited for, so that its time is the moment the work was done.
  struct Event {
    c10::DeviceIndex device;
    std::shared_ptr<Position> position;

    size_t dispatch() const { return Device::get().dispatch(device, *position); }
  };
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex device, const c10::EventFlag flag)
      const override {
    const auto on = device < 0 ? stream.device_index() : device;
    auto position = Device::get().mark(on, /*is_timed=*/flag == c10::EventFlag::BACKEND_DEFAULT);
    if (*event == nullptr) {
      *event = new Event;
    }
    *static_cast<Event*>(*event) = {on, std::move(position)};
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void* event) const override {
    const auto* recorded = static_cast<Event*>(event);
    return Device::get().done(recorded->device, recorded->dispatch());
  }
  void synchronizeEvent(void* event) const override {
    const auto* recorded = static_cast<Event*>(event);
    Device::get().wait(recorded->device, recorded->dispatch());
  }
  double elapsedTime(void* start, void* end, const c10::DeviceIndex) const override {
    TORCH_CHECK(start != nullptr && end != nullptr, "Both events must be recorded before calculating elapsed time.");
    const auto time_of = [](void* event) {
      const auto* recorded = static_cast<Event*>(event);
      recorded->dispatch();
      return recorded->position->time;
    };
    const auto began = time_of(start);
    return std::chrono::duration<double, std::milli>(time_of(end) - began).count();
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, GuardImpl)

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return Device::get().initialized(); }
  void init() const override { Device::get().ensure_initialized(); }
  c10::DeviceIndex deviceCount() const override { return Device::get().count(); }
  void setCurrentDevice(c10::DeviceIndex device) const override { Device::get().set_current(device); }
  c10::DeviceIndex getCurrentDevice() const override { return t_current; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    const auto before = t_current;
    Device::get().set_current(device);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return Device::get().default_generator(device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<GeneratorImpl>(Device::get().find(device));
  }
  c10::Device getDeviceFromPtr(void*) const override { return {kDeviceType, t_current}; }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    auto* impl = storage.unsafeGetStorageImpl();
    auto* old = static_cast<Buffer*>(impl->_mutable_data_ptr_no_checks().get_context());
    if (old == nullptr) {
      refuse_address();
    }
    auto& stream = Device::get().stream(old->device);
    StreamLock lock(stream.mutex());
    TORCH_CHECK(!stream.sink()->must_keep(*old), "a storage from before torch.tpu.rehearsal cannot be resized in it");
    // Where nothing is kept, the first write is expected to be like those before.  FSDP frees and regrows the memory of
    // gathered parameters: a step is the same program, whether it is the first to gather them or not.
    const size_t itemsize = c10::elementSize(old->layout->dtype);
    const bool is_emptied = !old->value || old->nbytes == 0 || nbytes == 0;
    const auto dtype = is_emptied && nbytes % itemsize == 0 ? old->layout->dtype : c10::kByte;
    const auto count = static_cast<int64_t>(nbytes / c10::elementSize(dtype));
    auto data = make_buffer(nbytes, intern_layout({count}, dtype), old->device);
    stream.copy_resized(old, static_cast<Buffer*>(data.get_context()));
    impl->set_data_ptr_noswap(std::move(data));
    impl->set_nbytes(nbytes);
  }
};

} // namespace

GeneratorImpl::GeneratorImpl(c10::DeviceIndex device)
    : c10::GeneratorImpl(c10::Device(kDeviceType, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
      seed_(c10::detail::getNonDeterministicRandom()) {
  seed_ = c10::default_rng_seed_val;
}

void GeneratorImpl::set_current_seed(uint64_t seed) {
  seed_ = seed;
  offset_ = 0;
}

uint64_t GeneratorImpl::seed() {
  set_current_seed(c10::detail::getNonDeterministicRandom());
  return seed_;
}

void GeneratorImpl::set_state(const c10::TensorImpl& state) {
  TORCH_CHECK(
      state.device_type() == c10::kCPU && c10::typeMetaToScalarType(state.dtype()) == c10::kByte &&
          state.numel() == 16 && state.is_contiguous(),
      "tpu RNG state must be a contiguous uint8 CPU tensor of 16 bytes (seed, offset), got ",
      state.numel(),
      " elements of ",
      state.dtype().name());
  const auto* bytes = static_cast<const char*>(state.data());
  std::memcpy(&seed_, bytes, 8);
  std::memcpy(&offset_, bytes + 8, 8);
}

c10::intrusive_ptr<c10::TensorImpl> GeneratorImpl::get_state() const {
  // Past the dispatcher: under FakeTensorMode, at::empty would have no memory.
  const at::Tensor state = at::detail::empty_cpu({16}, at::TensorOptions().dtype(c10::kByte));
  auto* bytes = static_cast<char*>(state.mutable_data_ptr());
  std::memcpy(bytes, &seed_, 8);
  std::memcpy(bytes + 8, &offset_, 8);
  return state.getIntrusivePtr();
}

GeneratorImpl* GeneratorImpl::clone_impl() const {
  auto* copy = new GeneratorImpl(device().index());
  copy->seed_ = seed_;
  copy->offset_ = offset_;
  return copy;
}

Device::Device() : count_(kNumDevices) {
  for (c10::DeviceIndex i = 0; i < count_; ++i) {
    streams_.push_back(std::make_unique<Stream>(i));
    generators_.push_back(at::make_generator<GeneratorImpl>(i));
  }
}

Device& Device::get() {
  static auto* instance = new Device; // never destroyed: tensors outlive static destruction
  return *instance;
}

void Device::ensure_initialized() {
  if (initialized()) {
    return;
  }
  check_not_forked();
  py::gil_scoped_acquire gil; // the import lock makes this happen once
  try {
    py::module_::import("tpu_backend.runtime").attr("initialize")();
  } catch (py::error_already_set& error) {
    if (is_interrupt(error)) {
      throw;
    }
    if (error.matches(PyExc_RuntimeError)) {
      TORCH_CHECK(false, std::string(py::str(error.value())));
    }
    TORCH_CHECK(false, error.what());
  }
}

Stream& Device::stream(c10::DeviceIndex device) {
  return *streams_[find(device)];
}

const at::Generator& Device::default_generator(c10::DeviceIndex device) {
  return generators_[find(device)];
}

void Device::mark_as_one_of_many() {
  int unmarked = kNotOneOfMany;
  own_number_.compare_exchange_strong(unmarked, kNotNamed);
}

bool Device::is_own_number(int index) const {
  if (const char* const local_rank = std::getenv("LOCAL_RANK")) {
    return std::to_string(index) == local_rank;
  }
  int named = kNotNamed;
  return own_number_.compare_exchange_strong(named, index) || named == index;
}

// For the error that names a device that does not exist: what this process's device is called beside "tpu:0".
std::string Device::other_name() const {
  if (const char* const local_rank = std::getenv("LOCAL_RANK")) {
    return c10::str("; each process of a launcher has one, \"tpu\" or, by its LOCAL_RANK, \"tpu:", local_rank, "\"");
  }
  const int named = own_number_;
  return named < 0 ? ", in each process: write \"tpu\"; a process of many may write \"tpu:LOCAL_RANK\" if that is set, "
                     "as torchrun does"
                   : c10::str("; this process has named it \"tpu:", named, "\" before");
}

c10::DeviceIndex Device::current() const {
  return t_current;
}

c10::DeviceIndex Device::find(int index) const {
  if (index < count_) {
    return index < 0 ? t_current : static_cast<c10::DeviceIndex>(index);
  }
  TORCH_CHECK(is_own_number(index), "tpu:", index, " does not exist: ", "there is one tpu device, tpu:0", other_name());
  return 0;
}

void Device::set_current(c10::DeviceIndex device) {
  t_current = find(device);
}

void Device::synchronize(c10::DeviceIndex device) {
  if (!initialized()) {
    return;
  }
  wait(device, dispatch(device));
}

size_t Device::dispatch(c10::DeviceIndex device) {
  auto& s = stream(device);
  StreamLock lock(s.mutex());
  s.cut();
  s.settle();
  return s.num_launched();
}

std::shared_ptr<Position> Device::mark(c10::DeviceIndex device, bool is_timed) {
  check_not_forked();
  auto& s = stream(device);
  std::shared_ptr<Position> position;
  bool is_reached = false;
  if (initialized()) {
    StreamLock lock(s.mutex());
    position = s.mark(is_timed);
    is_reached = !position->is_pending;
  } else {
    position = std::make_shared<Position>();
    position->is_pending = false;
    is_reached = true;
  }
  if (is_reached && is_timed) { // nobody else has it
    wait(device, dispatch(device, *position));
    position->time = std::chrono::steady_clock::now();
  }
  return position;
}

size_t Device::dispatch(c10::DeviceIndex device, const Position& position) {
  auto& s = stream(device);
  StreamLock lock(s.mutex());
  return s.dispatch(position);
}

void Device::wait(c10::DeviceIndex device, size_t num_launched) {
  if (!initialized()) {
    return;
  }
  py::gil_scoped_acquire gil;
  stream(device).wait(num_launched);
}

bool Device::done(c10::DeviceIndex device, size_t num_launched) {
  if (!initialized()) {
    return true;
  }
  py::gil_scoped_acquire gil;
  return stream(device).done(num_launched);
}

void Device::count_fallback(const std::string& op) {
  bool first = false;
  {
    std::lock_guard<std::mutex> guard(fallback_mutex_);
    first = ++fallbacks_[op] == 1;
  }
  if (first) { // outside the lock: a warning takes the GIL, and may be an exception
    TORCH_WARN(op, " has no tpu lowering and runs on the CPU (warned once; see torch.tpu.fallback_stats())");
  }
}

std::map<std::string, int64_t> Device::fallbacks() {
  std::lock_guard<std::mutex> guard(fallback_mutex_);
  return fallbacks_;
}

void Device::clear_fallbacks() {
  std::lock_guard<std::mutex> guard(fallback_mutex_);
  fallbacks_.clear();
}

void register_hooks() {
  c10::SetAllocator(kDeviceType, allocator());
  at::RegisterPrivateUse1HooksInterface(new Hooks); // PyTorch keeps it for the process
}

} // namespace tpu
