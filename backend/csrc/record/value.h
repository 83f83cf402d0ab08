// What a storage holds: a Buffer is the context of its DataPtr; a Value is one immutable version of its contents.
#pragma once

#include "record/layout.h"

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <Python.h>

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace tpu {

// One version of a buffer's contents.  Entries of the stream refer to values, never to buffers, so whatever happens to
// a tensor later (in-place writes, resize_, set_, del) cannot change what was recorded.
struct Value final : c10::intrusive_ptr_target {
  explicit Value(const Layout* value_layout) : layout(value_layout) {}
  Value(const Layout* value_layout, PyObject* owned_array) : layout(value_layout), array(owned_array) {}
  ~Value() override;
  void release_resources() override; // the last owner is gone, weak references may remain
  // As if it were new.
  void reset();

  const Layout* layout;
  PyObject* array{nullptr}; // the jax.Array, owned; null while the value is still to be computed
  uint64_t segment{0};      // serial number of the segment that numbered this value
  int32_t local{-1};        // its number there
  size_t launch{0};         // the launch that computed it, counted from 1; 0 where none did
  // A launcher is about to set array and error: nobody else looks at them, or at `launch` (Stream::settle).  Guarded by
  // the stream's lock.
  bool in_flight{false};
  bool is_remembered{false}; // it tells whether its launch is done (ProgramCache::remember)
  bool leased{false};        // JAX's side has seen the array, other arrays may share its memory: it is never donated
  std::shared_ptr<const std::string> error; // why the value could not be computed
};
using ValuePtr = c10::intrusive_ptr<Value>;
constexpr const char* kBeingCompiled = "this tensor is computed by a program that is being compiled right now, and "
                                       "what runs inside a compilation (a finalizer, a "
                                       "function of a jax_op) cannot wait for that: read it before";
constexpr const char* kNoValue = "this tensor has no value: ";                              // its error follows
constexpr const char* kProgramFailed = "it was to be computed by a program that failed:\n"; // how most errors begin

struct Buffer;
// Tells whether a buffer lives, and does not keep it alive.
struct BufferHandle {
  std::atomic<Buffer*> buffer; // null once it was freed
};

struct Buffer {
  ValuePtr value;       // null until first written
  const Layout* layout; // of `value`, or how a first write is expected
  size_t nbytes;
  uintptr_t address; // unique, never dereferenced
  c10::DeviceIndex device;
  uint32_t maker;   // the signature of the op that wrote it first, or kNoMaker
  uint64_t mark;    // of the call that last asked whether it is written twice
  Buffer* previous; // in the list of all that live
  Buffer* next;
  std::shared_ptr<BufferHandle> handle; // made when somebody asks for it
};
constexpr uint32_t kNoMaker = 0xffffffff; // nothing was written yet, or by the host

// Raises for a tensor that was made over a bare address (as legacy torch.save does): there is nothing at it.
[[noreturn]] void refuse_address();

// Never null.
inline Buffer* buffer_of(const at::Tensor& tensor) {
  void* context = tensor.unsafeGetTensorImpl()
                      ->unsafe_storage()
                      .unsafeGetStorageImpl()
                      ->_mutable_data_ptr_no_checks()
                      .get_context();
  if (C10_UNLIKELY(context == nullptr)) {
    refuse_address();
  }
  return static_cast<Buffer*>(context);
}

// Memory that tensors hold, in bytes.  Counted where storages are made and freed.
struct MemoryCounters {
  int64_t current;
  int64_t peak;
  int64_t allocations;
};
MemoryCounters memory_counters(c10::DeviceIndex device);
void reset_peak_memory(c10::DeviceIndex device);

c10::DataPtr make_buffer(size_t nbytes, const Layout* layout, c10::DeviceIndex device, uint32_t maker = kNoMaker);

struct LiveBuffer {
  size_t nbytes;
  const Layout* layout;
  uint32_t maker;
};
std::vector<LiveBuffer> live_buffers(c10::DeviceIndex device);
// Nobody makes or frees a buffer while this goes through them.
void for_each_live_buffer(c10::DeviceIndex device, const std::function<void(Buffer&)>& visit);
// With the lock of the buffer's stream held.
std::shared_ptr<BufferHandle> handle_of(Buffer& buffer);
// Buffers made from now on have this address or one above it.
uintptr_t next_address();
c10::Allocator* allocator();

// Whether a tensor is all of its buffer, in this order of its dims.
bool fills_buffer(const at::Tensor& tensor, const MemoryOrder& order);

// A storage over a new buffer.
c10::Storage make_storage(const Layout* layout, c10::DeviceIndex device, uint32_t maker = kNoMaker);
at::Tensor tensor_in(
    c10::Storage storage, c10::ScalarType dtype, c10::IntArrayRef sizes, c10::IntArrayRef strides, int64_t offset = 0);
// A tensor over a new buffer.  Strides must be dense or the storage is padded to what they span.
at::Tensor
make_tensor(c10::IntArrayRef sizes, c10::IntArrayRef strides, c10::ScalarType dtype, c10::DeviceIndex device);

// Drop a Python reference from any thread: at once if the GIL is held, else when somebody who holds it drains the
// queue.
void release_reference(PyObject* object) noexcept;
void drain_released_references();
// A shared Python reference that may be dropped on any thread.
std::shared_ptr<PyObject> shared_reference(PyObject* owned);

} // namespace tpu
