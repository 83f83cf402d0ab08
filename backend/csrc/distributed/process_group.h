// The c10d backend "tpu": collectives as recorded operators.
#pragma once

#include "record/value.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <string>
#include <vector>

namespace tpu {

// A collective that was recorded.  Waiting for it orders the stream, as NCCL's does: what is recorded later comes later, and the
// host goes on.  Only where a time is given, and for a barrier, does the host wait for the device.
class Work final : public c10d::Work {
 public:
  Work(
      c10d::OpType op,
      int rank,
      std::vector<at::Tensor> results,
      std::string group,
      uint64_t number,
      bool waits,
      std::chrono::milliseconds timeout);

  bool isCompleted() override;
  bool isSuccess() const override {
    return true;
  }
  bool wait(std::chrono::milliseconds timeout) override;
  void synchronize() override {}
  std::vector<at::Tensor> result() override {
    return results_;
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 private:
  std::vector<at::Tensor> results_;
  std::string group_; // its ranks
  uint64_t number_; // of the call in the group
  bool waits_;
  std::chrono::milliseconds timeout_;
  ValuePtr value_; // it is done when this is computed
  size_t launch_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

// One group.  Ranks are those of the world, in the order of the group.
class ProcessGroup final : public c10d::Backend {
 public:
  ProcessGroup(int rank, std::vector<int64_t> ranks, std::string name, std::chrono::milliseconds timeout);

  const std::string getBackendName() const override {
    return "tpu";
  }
  c10::intrusive_ptr<Options> getBackendOptions() override {
    return options_;
  }
  void setTimeout(std::chrono::milliseconds timeout) override {
    options_->timeout = timeout;
  }
  bool supportsCoalescing() const override {
    return true;
  }
  // Point-to-point calls in between are launched at the end, in an order that both ends share.
  void startCoalescing() override;
  c10::intrusive_ptr<c10d::Work> endCoalescing() override;
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override {
    return num_collectives_;
  }
  c10d::ErrorType getError() override {
    return c10d::ErrorType::SUCCESS;
  }

  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor>& tensors, const c10d::BroadcastOptions& options) override;
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& options) override;
  c10::intrusive_ptr<c10d::Work> allreduce_coalesced(
      std::vector<at::Tensor>& tensors, const c10d::AllreduceCoalescedOptions& options) override;
  c10::intrusive_ptr<c10d::Work> reduce(std::vector<at::Tensor>& tensors, const c10d::ReduceOptions& options) override;
  c10::intrusive_ptr<c10d::Work> allgather(
      std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs, const c10d::AllgatherOptions& options) override;
  c10::intrusive_ptr<c10d::Work> _allgather_base(
      at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override;
  c10::intrusive_ptr<c10d::Work> allgather_into_tensor_coalesced(
      std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs, const c10d::AllgatherOptions& options) override;
  c10::intrusive_ptr<c10d::Work> gather(
      std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs, const c10d::GatherOptions& options) override;
  c10::intrusive_ptr<c10d::Work> scatter(
      std::vector<at::Tensor>& outputs, std::vector<std::vector<at::Tensor>>& inputs, const c10d::ScatterOptions& options) override;
  c10::intrusive_ptr<c10d::Work> reduce_scatter(
      std::vector<at::Tensor>& outputs,
      std::vector<std::vector<at::Tensor>>& inputs,
      const c10d::ReduceScatterOptions& options) override;
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override;
  c10::intrusive_ptr<c10d::Work> reduce_scatter_tensor_coalesced(
      std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs, const c10d::ReduceScatterOptions& options) override;
  c10::intrusive_ptr<c10d::Work> alltoall_base(
      at::Tensor& output,
      at::Tensor& input,
      std::vector<int64_t>& output_splits,
      std::vector<int64_t>& input_splits,
      const c10d::AllToAllOptions& options) override;
  c10::intrusive_ptr<c10d::Work> alltoall(
      std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs, const c10d::AllToAllOptions& options) override;
  c10::intrusive_ptr<c10d::Work> send(std::vector<at::Tensor>& tensors, int destination, int tag) override;
  c10::intrusive_ptr<c10d::Work> recv(std::vector<at::Tensor>& tensors, int source, int tag) override;
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions& options) override;

 private:
  struct Transfer {
    at::Tensor tensor;
    int source;
    int destination;
  };

  // To be called before a collective is recorded, by each rank of the group in the same order.  The first time that a call is made
  // it waits until all ranks have made it; later calls are compared meanwhile.  Raises where they differ, or a rank does not come.
  void agree(const char* name, const at::Tensor& tensor, c10::string_view reduce = {}, int64_t root = -1);
  // Returns the number of the call.
  uint64_t agree(const std::vector<int64_t>& ranks, const std::string& call);
  c10::intrusive_ptr<c10d::Work> done(
      c10d::OpType op, std::vector<at::Tensor> results, std::chrono::milliseconds timeout, bool waits = false);
  void reduce_into(const at::Tensor& output, const at::Tensor& input, const c10d::ReduceOp& op);
  void gather_into(at::Tensor output, const at::Tensor& input);
  void reduce_scatter_into(const at::Tensor& output, const at::Tensor& input, const c10d::ReduceOp& op);
  // The flat tensors of all ranks of different lengths; `lengths` by rank.
  std::vector<at::Tensor> gather_uneven(const at::Tensor& input, const std::vector<int64_t>& lengths);
  void exchange(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs);
  c10::intrusive_ptr<c10d::Work> transfer(Transfer transfer, c10d::OpType op);
  void launch(const Transfer& transfer);

  const std::vector<int64_t> ranks_;
  const std::string name_;
  const c10::intrusive_ptr<Options> options_;
  const std::string group_; // its ranks: "0,1,2"
  uint64_t num_collectives_{0}; // by the count of `agree`
  bool is_coalescing_{false};
  std::vector<Transfer> transfers_;
  std::vector<at::Tensor> coalesced_;
};

} // namespace tpu
