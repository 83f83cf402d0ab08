// The c10d backend "tpu": collectives as recorded operators.
#pragma once

#include "launch/program.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <deque>
#include <string>
#include <vector>

namespace tpu {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// What a rank tells the others that it is about to do, see tpu_backend/distributed/agreement.py.
struct Call {
  std::string group;  // its ranks: "0,1,2"
  uint64_t number{0}; // of the calls of these ranks
  std::string text{}; // op, dtype, shape
};

// A collective that was recorded.  Waiting for it orders the stream, as NCCL's does: what is recorded later comes
// later, and the host goes on.  Only where a time is given, and for a barrier, does the host wait for the device.
class Work final : public c10d::Work {
 public:
  Work(
      c10d::OpType op,
      int rank,
      std::vector<at::Tensor> results,
      Call call,
      bool waits,
      std::chrono::milliseconds timeout);
  // A transfer that its group has not recorded yet.  It is recorded when somebody waits for it, or when `group` goes
  // on.
  Work(
      c10d::OpType op,
      int rank,
      at::Tensor tensor,
      std::chrono::milliseconds timeout,
      c10::weak_intrusive_ptr<c10d::Backend> group);

  void recorded(Call call, int source);

  bool isCompleted() override; // launches what is recorded, also in a region
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds timeout) override;
  void synchronize() override { record(); }
  int sourceRank() const override;
  std::vector<at::Tensor> result() override { return results_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 private:
  void record(); // a transfer, if that was not done yet

  std::vector<at::Tensor> results_;
  Call call_; // the last that it stands for
  bool waits_;
  std::chrono::milliseconds timeout_;
  std::shared_ptr<Position> position_{};         // behind its entries
  c10::weak_intrusive_ptr<c10d::Backend> group_; // of a transfer
  int source_{-1};                               // of a transfer
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

// One group.  Ranks are those of the world, in the order of the group.
class ProcessGroup final : public c10d::Backend {
 public:
  ProcessGroup(int rank, std::vector<int64_t> ranks, std::chrono::milliseconds timeout);

  const std::string getBackendName() const override { return "tpu"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
  void setTimeout(std::chrono::milliseconds timeout) override { options_->timeout = timeout; }
  bool supportsCoalescing() const override { return true; }
  bool supportsSplitting() const override { return true; }
  c10::intrusive_ptr<Backend> split(
      const c10::intrusive_ptr<c10d::Store>& store,
      const std::vector<int>& ranks,
      const c10::intrusive_ptr<Options>& options) override;
  // Groups of the same ranks are aborted with it, for good.
  void abort() override;
  // Point-to-point calls in between are recorded at the end.
  void startCoalescing() override {}
  WorkPtr endCoalescing() override;
  // Those that wait to be recorded, in an order that both ends share.
  void record_transfers();
  void shutdown() override { record_transfers(); }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return last_call_.number; }
  c10d::ErrorType getError() override { return c10d::ErrorType::SUCCESS; }

  WorkPtr broadcast(std::vector<at::Tensor>& tensors, const c10d::BroadcastOptions& options) override;
  WorkPtr allreduce(std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr
  allreduce_coalesced(std::vector<at::Tensor>& tensors, const c10d::AllreduceCoalescedOptions& options) override;
  WorkPtr reduce(std::vector<at::Tensor>& tensors, const c10d::ReduceOptions& options) override;
  WorkPtr allgather(
      std::vector<std::vector<at::Tensor>>& outputs,
      std::vector<at::Tensor>& inputs,
      const c10d::AllgatherOptions& options) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_into_tensor_coalesced(
      std::vector<at::Tensor>& outputs,
      std::vector<at::Tensor>& inputs,
      const c10d::AllgatherOptions& options) override;
  WorkPtr gather(
      std::vector<std::vector<at::Tensor>>& outputs,
      std::vector<at::Tensor>& inputs,
      const c10d::GatherOptions& options) override;
  WorkPtr scatter(
      std::vector<at::Tensor>& outputs,
      std::vector<std::vector<at::Tensor>>& inputs,
      const c10d::ScatterOptions& options) override;
  WorkPtr reduce_scatter(
      std::vector<at::Tensor>& outputs,
      std::vector<std::vector<at::Tensor>>& inputs,
      const c10d::ReduceScatterOptions& options) override;
  WorkPtr
  _reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override;
  WorkPtr reduce_scatter_tensor_coalesced(
      std::vector<at::Tensor>& outputs,
      std::vector<at::Tensor>& inputs,
      const c10d::ReduceScatterOptions& options) override;
  WorkPtr alltoall_base(
      at::Tensor& output,
      at::Tensor& input,
      std::vector<int64_t>& output_splits,
      std::vector<int64_t>& input_splits,
      const c10d::AllToAllOptions& options) override;
  WorkPtr alltoall(
      std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs, const c10d::AllToAllOptions& options) override;
  WorkPtr send(std::vector<at::Tensor>& tensors, int destination, int tag) override;
  WorkPtr recv(std::vector<at::Tensor>& tensors, int source, int tag) override;
  WorkPtr recvAnysource(std::vector<at::Tensor>& tensors, int tag) override;
  WorkPtr barrier(const c10d::BarrierOptions& options) override;

 private:
  struct Transfer {
    at::Tensor tensor;
    int source; // kAnySource: the rank that sends first
    int destination;
    int tag;
    c10::intrusive_ptr<Work> work{};
  };
  static constexpr int kAnySource = -1;

  // To be called before a collective is recorded, by each rank of the group in the same order.  The first time that a
  // call is made it waits until all ranks have made it; later calls are compared meanwhile.  Raises where they differ,
  // or a rank does not come.
  void agree(const char* name, const at::Tensor& tensor, c10::string_view reduce = {}, int64_t root = -1);
  Call agree(const std::vector<int64_t>& ranks, std::string text);
  WorkPtr done(c10d::OpType op, std::vector<at::Tensor> results, std::chrono::milliseconds timeout, bool waits = false);
  WorkPtr done(
      c10d::OpType op,
      std::vector<at::Tensor> results,
      Call call,
      std::chrono::milliseconds timeout,
      bool waits = false);
  void reduce_into(const at::Tensor& output, const at::Tensor& input, const c10d::ReduceOp& op);
  void gather_into(at::Tensor output, const at::Tensor& input);
  void reduce_scatter_into(const at::Tensor& output, const at::Tensor& input, const c10d::ReduceOp& op);
  // The flat tensors of all ranks of different lengths; `lengths` by rank.
  std::vector<at::Tensor> gather_uneven(const at::Tensor& input, const std::vector<int64_t>& lengths);
  void exchange(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs);
  WorkPtr transfer(Transfer transfer, c10d::OpType op);
  Call record(const Transfer& transfer); // an empty tensor is not sent
  int find_source();

  const std::vector<int64_t> ranks_;
  const size_t number_; // among the groups of these ranks
  const c10::intrusive_ptr<Options> options_;
  Call last_call_; // of the whole group
  Call last_transfer_;
  std::vector<Transfer> transfers_;     // not recorded yet
  std::deque<at::Tensor> sent_to_self_; // and not received yet
};

} // namespace tpu
