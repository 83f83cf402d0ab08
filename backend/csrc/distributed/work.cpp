// A collective that was recorded, as its caller waits for it.
#include "device/device.h"
#include "distributed/process_group.h"
#include "record/stream.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

namespace py = pybind11;

namespace tpu {

Work::Work(
    c10d::OpType op,
    int rank,
    std::vector<at::Tensor> results,
    Call call,
    bool waits,
    std::chrono::milliseconds timeout)
    : c10d::Work(rank, op), results_(std::move(results)), call_(std::move(call)), waits_(waits), timeout_(timeout),
      position_(Device::get().mark(Device::get().current(), /*is_timed=*/false)),
      group_(c10::intrusive_ptr<c10d::Backend>()) {}

Work::Work(
    c10d::OpType op,
    int rank,
    at::Tensor tensor,
    std::chrono::milliseconds timeout,
    c10::weak_intrusive_ptr<c10d::Backend> group)
    : c10d::Work(rank, op), results_{std::move(tensor)}, waits_(false), timeout_(timeout), group_(std::move(group)) {}

void Work::recorded(Call call, int source) {
  call_ = std::move(call);
  source_ = source;
  position_ = Device::get().mark(Device::get().current(), /*is_timed=*/false);
}

void Work::record() {
  if (position_ != nullptr) {
    return;
  }
  if (const auto group = group_.lock()) {
    static_cast<ProcessGroup*>(group.get())->record_transfers();
  }
  TORCH_CHECK(
      position_ != nullptr,
      "this send or recv was not launched: an earlier call of its group failed, or the group has ended");
}

int Work::sourceRank() const {
  TORCH_CHECK(source_ >= 0, "only a recv that was waited for knows the rank that sent");
  return source_;
}

bool Work::isCompleted() {
  record();
  const auto device = Device::get().current();
  return Device::get().done(device, Device::get().dispatch(device, *position_));
}

bool Work::wait(std::chrono::milliseconds timeout) {
  record();
  if (timeout == kNoTimeout && !waits_) {
    return true;
  }
  const auto limit = timeout == kNoTimeout ? timeout_ : timeout;
  std::shared_ptr<PyObject> token;
  {
    auto& stream = Device::get().stream(Device::get().current());
    StreamLock lock(stream.mutex());
    if (position_->is_pending && stream.sink()->joins_collectives()) {
      return true; // nothing of a region is launched before its end
    }
    token = stream.token_of(stream.dispatch(*position_));
  }
  py::gil_scoped_acquire gil;
  py::module_::import("tpu_backend.distributed.waiting")
      .attr("wait_for_call")(
          token == nullptr ? py::none() : py::reinterpret_borrow<py::object>(token.get()),
          std::chrono::duration<double>(limit).count(),
          c10::str(call_.text, " of ranks ", call_.group),
          call_.group,
          call_.number);
  return true;
}

c10::intrusive_ptr<c10::ivalue::Future> Work::getFuture() {
  record();
  if (!future_) {
    std::vector<c10::Device> devices;
    if (!results_.empty()) {
      devices.push_back(results_.front().device());
    }
    future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()), devices);
    future_->markCompleted(at::IValue(results_));
  }
  return future_;
}

} // namespace tpu
