#include "distributed/process_group.h"

#include "device/device.h"
#include "record/stream.h"
#include "record/value.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <ATen/record_function.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <bit>
#include <map>
#include <mutex>
#include <numeric>

namespace py = pybind11;

namespace tpu {
namespace {

// A copy in a buffer of its own.
at::Tensor copied(const at::Tensor& tensor) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("tpu::copy", "")
                             .typed<at::Tensor&(const at::Tensor&, at::Tensor&)>();
  at::Tensor own = at::empty(tensor.sizes(), tensor.options());
  op.call(tensor, own);
  return own;
}

// A dense tensor that fills its buffer.  Ranks may hold different views, and a collective must read the same layout on
// all of them.
at::Tensor alone(const at::Tensor& tensor) {
  const Buffer& buffer = *buffer_of(tensor);
  const bool is_alone = tensor.nbytes() == buffer.nbytes && tensor.is_contiguous() &&
      tensor.scalar_type() == buffer.layout->dtype && tensor.sizes() == c10::IntArrayRef(buffer.layout->dims);
  return is_alone ? tensor : copied(tensor);
}

bool is_in_region() {
  auto& stream = Device::get().stream(Device::get().current());
  const StreamLock lock(stream.mutex());
  return stream.sink()->joins_collectives();
}

// The recorded operators, see tpu_backend/distributed/operators.py.
namespace recorded {

template <class Schema>
auto find(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(c10::str("tpu_collective::", name).c_str(), "").typed<Schema>();
}

at::Tensor all_reduce(const at::Tensor& self, c10::string_view reduce, at::IntArrayRef ranks) {
  static const auto op = find<at::Tensor(const at::Tensor&, c10::string_view, at::IntArrayRef)>("all_reduce");
  return op.call(alone(self), reduce, ranks);
}
at::Tensor all_gather(const at::Tensor& self, at::IntArrayRef ranks) {
  static const auto op = find<at::Tensor(const at::Tensor&, at::IntArrayRef)>("all_gather");
  return op.call(alone(self), ranks);
}
at::Tensor reduce_scatter(const at::Tensor& self, c10::string_view reduce, at::IntArrayRef ranks) {
  static const auto op = find<at::Tensor(const at::Tensor&, c10::string_view, at::IntArrayRef)>("reduce_scatter");
  return op.call(alone(self), reduce, ranks);
}
at::Tensor all_to_all(const at::Tensor& self, at::IntArrayRef ranks) {
  static const auto op = find<at::Tensor(const at::Tensor&, at::IntArrayRef)>("all_to_all");
  return op.call(alone(self), ranks);
}
at::Tensor broadcast(const at::Tensor& self, int64_t root, at::IntArrayRef ranks) {
  static const auto op = find<at::Tensor(const at::Tensor&, int64_t, at::IntArrayRef)>("broadcast");
  return op.call(alone(self), root, ranks);
}
at::Tensor send_receive(const at::Tensor& self, int64_t source, at::IntArrayRef ranks) {
  static const auto op = find<at::Tensor(const at::Tensor&, int64_t, at::IntArrayRef)>("send_receive");
  return op.call(alone(self), source, ranks);
}

} // namespace recorded

c10::string_view name_of(const c10d::ReduceOp& op) {
  switch (op) {
  case c10d::ReduceOp::SUM:
  case c10d::ReduceOp::PREMUL_SUM:
    return "sum";
  case c10d::ReduceOp::AVG:
    return "avg";
  case c10d::ReduceOp::PRODUCT:
    return "product";
  case c10d::ReduceOp::MIN:
    return "min";
  case c10d::ReduceOp::MAX:
    return "max";
  case c10d::ReduceOp::BAND:
    return "band";
  case c10d::ReduceOp::BOR:
    return "bor";
  case c10d::ReduceOp::BXOR:
    return "bxor";
  default:
    TORCH_CHECK_VALUE(false, "this reduction is none of SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR and PREMUL_SUM");
  }
}

// What is reduced: PREMUL_SUM multiplies first.
at::Tensor prepared(const at::Tensor& input, const c10d::ReduceOp& op) {
  const bool is_bitwise = op == c10d::ReduceOp::BAND || op == c10d::ReduceOp::BOR || op == c10d::ReduceOp::BXOR;
  TORCH_CHECK_TYPE(
      !is_bitwise || c10::isIntegralType(input.scalar_type(), /*includeBool=*/true),
      "a bitwise reduction of ",
      input.scalar_type(),
      ": BAND, BOR and BXOR take integers and bool");
  TORCH_CHECK_TYPE(
      op != c10d::ReduceOp::AVG || !c10::isIntegralType(input.scalar_type(), /*includeBool=*/true),
      "an average of ",
      input.scalar_type(),
      ": AVG takes floats; reduce by SUM and divide");
  if (op != c10d::ReduceOp::PREMUL_SUM) {
    return input;
  }
  const auto* premul = dynamic_cast<const c10d::PreMulSumSupplement*>(op.supplement_.get());
  TORCH_CHECK_VALUE(premul != nullptr, "PREMUL_SUM without its factor");
  return premul->tensor_factor.defined() ? input * premul->tensor_factor : input * premul->double_factor;
}

void check_on_device(const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(
      tensor.device().type() == kDeviceType,
      "a collective of the tpu backend was given a tensor on ",
      tensor.device(),
      ": move it to the device, or make the group with \"cpu:gloo,tpu:tpu\"");
}

const at::Tensor& only(const std::vector<at::Tensor>& tensors) {
  TORCH_CHECK_VALUE(tensors.size() == 1, "a collective takes one tensor a rank, and was given ", tensors.size());
  check_on_device(tensors.front());
  return tensors.front();
}

bool is_same_shape(const std::vector<at::Tensor>& tensors) {
  return std::all_of(tensors.begin(), tensors.end(), [&](const at::Tensor& tensor) {
    return tensor.sizes() == tensors.front().sizes();
  });
}

// A flat tensor with zeros behind it.
at::Tensor padded(const at::Tensor& tensor, int64_t length) {
  const at::Tensor flat = tensor.reshape(-1);
  return flat.numel() == length ? copied(flat) : at::constant_pad_nd(flat, {0, length - flat.numel()});
}

// A call in the profiler, with its tensors, as PyTorch's own backends have it.  Its time is that of the host.
class Profiled {
 public:
  Profiled(const char* name, at::TensorList tensors) : function_(at::RecordScope::USER_SCOPE) {
    if (function_.isActive()) {
      function_._setAsync();
      inputs_.assign(tensors.begin(), tensors.end());
      function_.before(std::string_view(name), c10::ArrayRef<const c10::IValue>(inputs_.data(), inputs_.size()));
    }
  }

 private:
  std::vector<c10::IValue> inputs_;
  at::RecordFunction function_;
};

// How many groups of these ranks this process has made before.  They make them in one order, as PyTorch asks.
size_t next_number(const std::vector<int64_t>& ranks) {
  static std::mutex mutex;
  static std::map<std::vector<int64_t>, size_t> numbers;
  const std::lock_guard guard(mutex);
  return numbers[ranks]++;
}

} // namespace

ProcessGroup::ProcessGroup(int rank, std::vector<int64_t> ranks, std::chrono::milliseconds timeout)
    : Backend(rank, static_cast<int>(ranks.size())), ranks_(std::move(ranks)), number_(next_number(ranks_)),
      options_(c10::make_intrusive<Options>("tpu", timeout)), last_call_{.group = c10::str(c10::Join(",", ranks_))},
      last_transfer_(last_call_) {}

c10::intrusive_ptr<c10d::Backend> ProcessGroup::split(
    const c10::intrusive_ptr<c10d::Store>&, const std::vector<int>& ranks, const c10::intrusive_ptr<Options>& options) {
  const auto mine = std::find(ranks.begin(), ranks.end(), getRank());
  if (mine == ranks.end()) {
    return nullptr;
  }
  std::vector<int64_t> in_world;
  for (const int rank : ranks) {
    in_world.push_back(ranks_.at(rank));
  }
  return c10::make_intrusive<ProcessGroup>(
      static_cast<int>(mine - ranks.begin()), std::move(in_world), options->timeout);
}

void ProcessGroup::abort() {
  transfers_.clear();
  py::gil_scoped_acquire gil;
  py::module_::import("tpu_backend.distributed.waiting").attr("abort")(last_call_.group);
}

void ProcessGroup::agree(const char* name, const at::Tensor& tensor, c10::string_view reduce, int64_t root) {
  record_transfers();
  auto call =
      c10::str(name, "(", c10::toString(tensor.scalar_type()), tensor.sizes(), reduce.empty() ? "" : ", ", reduce);
  if (root >= 0) {
    call += c10::str(", root ", root);
  }
  last_call_ = agree(ranks_, call + ")");
}

Call ProcessGroup::agree(const std::vector<int64_t>& ranks, std::string text) {
  const bool is_part = is_in_region(); // its ranks compare all calls of a region where they launch it
  py::gil_scoped_acquire gil;
  const auto agreement = py::module_::import("tpu_backend.distributed.agreement");
  if (number_ > 0) { // all of them are one order of calls: the device has no other
    text += c10::str(" in group ", number_ + 1, " of ranks ", c10::Join(",", ranks_));
  }
  Call call{.group = c10::str(c10::Join(",", ranks)), .text = std::move(text)};
  if (is_part) {
    agreement.attr("refuse")(call.group);
  } else {
    const double seconds = std::chrono::duration<double>(options_->timeout).count();
    call.number = agreement.attr("call")(call.group, call.text, seconds).cast<uint64_t>();
  }
  return call;
}

WorkPtr
ProcessGroup::done(c10d::OpType op, std::vector<at::Tensor> results, std::chrono::milliseconds timeout, bool waits) {
  return done(op, std::move(results), last_call_, timeout, waits);
}

WorkPtr ProcessGroup::done(
    c10d::OpType op, std::vector<at::Tensor> results, Call call, std::chrono::milliseconds timeout, bool waits) {
  const auto limit = timeout == c10d::kUnsetTimeout ? options_->timeout : timeout;
  return c10::make_intrusive<Work>(op, getRank(), std::move(results), std::move(call), waits, limit);
}

void ProcessGroup::reduce_into(const at::Tensor& output, const at::Tensor& input, const c10d::ReduceOp& op) {
  if (input.numel() != 0) {
    agree("all_reduce", input, name_of(op));
    output.copy_(recorded::all_reduce(prepared(input, op), name_of(op), ranks_));
  }
}

WorkPtr ProcessGroup::broadcast(std::vector<at::Tensor>& tensors, const c10d::BroadcastOptions& options) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  const Profiled profiled("tpu:broadcast", tensors);
  const at::Tensor& tensor = only(tensors);
  if (tensor.numel() != 0) {
    agree("broadcast", tensor, {}, options.rootRank);
    tensor.copy_(recorded::broadcast(tensor, options.rootRank, ranks_));
  }
  return done(c10d::OpType::BROADCAST, tensors, options.timeout);
}

WorkPtr ProcessGroup::allreduce(std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& options) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  const Profiled profiled("tpu:all_reduce", tensors);
  reduce_into(only(tensors), tensors.front(), options.reduceOp);
  return done(c10d::OpType::ALLREDUCE, tensors, options.timeout);
}

WorkPtr
ProcessGroup::allreduce_coalesced(std::vector<at::Tensor>& tensors, const c10d::AllreduceCoalescedOptions& options) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  const Profiled profiled("tpu:all_reduce", tensors);
  for (const at::Tensor& tensor : tensors) {
    check_on_device(tensor);
    reduce_into(tensor, tensor, options.reduceOp);
  }
  return done(c10d::OpType::ALLREDUCE_COALESCED, tensors, options.timeout);
}

WorkPtr ProcessGroup::reduce(std::vector<at::Tensor>& tensors, const c10d::ReduceOptions& options) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  const Profiled profiled("tpu:reduce", tensors);
  const at::Tensor& tensor = only(tensors);
  if (tensor.numel() != 0) {
    agree("reduce", tensor, name_of(options.reduceOp), options.rootRank);
    const at::Tensor reduced =
        recorded::all_reduce(prepared(tensor, options.reduceOp), name_of(options.reduceOp), ranks_);
    if (getRank() == options.rootRank) {
      tensor.copy_(reduced);
    }
  }
  return done(c10d::OpType::REDUCE, tensors, options.timeout);
}

void ProcessGroup::gather_into(at::Tensor output, const at::Tensor& input) {
  check_on_device(input);
  check_on_device(output);
  TORCH_CHECK_VALUE(
      output.numel() == input.numel() * getSize() && output.scalar_type() == input.scalar_type(),
      "all_gather into ",
      output.scalar_type(),
      output.sizes(),
      " of ",
      getSize(),
      " tensors ",
      input.scalar_type(),
      input.sizes(),
      ": the output must have as many elements and their dtype");
  if (input.numel() == 0) {
    return;
  }
  agree("all_gather", input);
  // N dimensions stay N: to flatten them is a relayout on a TPU.
  const bool is_tiled = input.dim() > 0 && output.dim() == input.dim() && output.size(0) == getSize() * input.size(0) &&
      output.sizes().slice(1) == input.sizes().slice(1);
  if (is_tiled) {
    output.copy_(recorded::all_gather(input, ranks_));
  } else {
    output.copy_(recorded::all_gather(input.reshape(-1), ranks_).view(output.sizes()));
  }
}

std::vector<at::Tensor> ProcessGroup::gather_uneven(const at::Tensor& input, const std::vector<int64_t>& lengths) {
  const int64_t longest = *std::max_element(lengths.begin(), lengths.end());
  if (longest == 0) {
    return std::vector<at::Tensor>(lengths.size(), input.reshape(-1));
  }
  const at::Tensor row = padded(input, longest);
  agree("all_gather", row);
  const auto rows = recorded::all_gather(row, ranks_).view({getSize(), longest}).unbind(0);
  std::vector<at::Tensor> parts;
  for (size_t rank = 0; rank < rows.size(); ++rank) {
    parts.push_back(rows[rank].narrow(0, 0, lengths[rank]));
  }
  return parts;
}

WorkPtr ProcessGroup::allgather(
    std::vector<std::vector<at::Tensor>>& outputs,
    std::vector<at::Tensor>& inputs,
    const c10d::AllgatherOptions& options) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  const Profiled profiled("tpu:all_gather", inputs);
  const at::Tensor& input = only(inputs);
  TORCH_CHECK_VALUE(
      outputs.size() == 1 && static_cast<int>(outputs.front().size()) == getSize(),
      "all_gather of ",
      getSize(),
      " ranks needs a list of as many outputs");
  auto& parts = outputs.front();
  std::vector<int64_t> lengths;
  for (const at::Tensor& part : parts) {
    check_on_device(part);
    lengths.push_back(part.numel());
  }
  TORCH_CHECK_VALUE(
      lengths[getRank()] == input.numel(),
      "all_gather: this rank's own output has ",
      lengths[getRank()],
      " elements, its input ",
      input.numel());
  const auto gathered = gather_uneven(input, lengths);
  for (size_t rank = 0; rank < parts.size(); ++rank) {
    parts[rank].copy_(gathered[rank].view(parts[rank].sizes()));
  }
  return done(c10d::OpType::ALLGATHER, parts, options.timeout);
}

WorkPtr ProcessGroup::_allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  const Profiled profiled("tpu:all_gather_into_tensor", input);
  gather_into(output, input);
  return done(c10d::OpType::_ALLGATHER_BASE, {output}, options.timeout);
}

WorkPtr ProcessGroup::allgather_into_tensor_coalesced(
    std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs, const c10d::AllgatherOptions& options) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  const Profiled profiled("tpu:all_gather_into_tensor", inputs);
  for (size_t i = 0; i < inputs.size(); ++i) {
    gather_into(outputs.at(i), inputs[i]);
  }
  return done(c10d::OpType::ALLGATHER_COALESCED, outputs, options.timeout);
}

WorkPtr ProcessGroup::gather(
    std::vector<std::vector<at::Tensor>>& outputs,
    std::vector<at::Tensor>& inputs,
    const c10d::GatherOptions& options) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  const Profiled profiled("tpu:gather", inputs);
  const at::Tensor& input = only(inputs);
  const std::vector<int64_t> lengths(getSize(), input.numel());
  const auto gathered = gather_uneven(input, lengths);
  std::vector<at::Tensor> results;
  if (getRank() == options.rootRank) {
    TORCH_CHECK_VALUE(
        outputs.size() == 1 && static_cast<int>(outputs.front().size()) == getSize(),
        "gather to this rank needs a list of ",
        getSize(),
        " outputs");
    results = outputs.front();
    for (size_t rank = 0; rank < results.size(); ++rank) {
      results[rank].copy_(gathered[rank].view(results[rank].sizes()));
    }
  }
  return done(c10d::OpType::GATHER, results, options.timeout);
}

WorkPtr ProcessGroup::scatter(
    std::vector<at::Tensor>& outputs,
    std::vector<std::vector<at::Tensor>>& inputs,
    const c10d::ScatterOptions& options) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  const Profiled profiled("tpu:scatter", outputs);
  const at::Tensor& output = only(outputs);
  const bool is_root = getRank() == options.rootRank;
  TORCH_CHECK_VALUE(
      !is_root ||
          (inputs.size() == 1 && static_cast<int>(inputs.front().size()) == getSize() && is_same_shape(inputs.front())),
      "scatter from this rank needs a list of ",
      getSize(),
      " inputs of one shape");
  if (output.numel() != 0) {
    const at::Tensor parts = is_root ? at::stack(inputs.front()).view({getSize(), -1})
                                     : at::zeros({getSize(), output.numel()}, output.options());
    agree("scatter", parts, {}, options.rootRank);
    output.copy_(recorded::all_to_all(parts, ranks_).select(0, options.rootRank).view(output.sizes()));
  }
  return done(c10d::OpType::SCATTER, outputs, options.timeout);
}

void ProcessGroup::reduce_scatter_into(const at::Tensor& output, const at::Tensor& input, const c10d::ReduceOp& op) {
  check_on_device(input);
  check_on_device(output);
  TORCH_CHECK_VALUE(
      input.numel() == output.numel() * getSize() && output.scalar_type() == input.scalar_type(),
      "reduce_scatter of ",
      input.scalar_type(),
      input.sizes(),
      " over ",
      getSize(),
      " ranks into ",
      output.scalar_type(),
      output.sizes(),
      ": the input must have as many elements as all outputs together, and their dtype");
  const bool is_bitwise = op == c10d::ReduceOp::BAND || op == c10d::ReduceOp::BOR || op == c10d::ReduceOp::BXOR;
  TORCH_CHECK_VALUE(!is_bitwise, "reduce_scatter takes SUM, AVG, PRODUCT, MIN, MAX and PREMUL_SUM");
  if (output.numel() == 0) {
    return;
  }
  const bool is_tiled = output.dim() > 0 && output.dim() == input.dim() &&
      input.size(0) == getSize() * output.size(0) && output.sizes().slice(1) == input.sizes().slice(1);
  const at::Tensor whole = prepared(is_tiled ? input : input.reshape(-1), op);
  agree("reduce_scatter", whole, name_of(op));
  output.copy_(recorded::reduce_scatter(whole, name_of(op), ranks_).view(output.sizes()));
}

WorkPtr ProcessGroup::reduce_scatter(
    std::vector<at::Tensor>& outputs,
    std::vector<std::vector<at::Tensor>>& inputs,
    const c10d::ReduceScatterOptions& options) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  const Profiled profiled("tpu:reduce_scatter", outputs);
  const at::Tensor& output = only(outputs);
  TORCH_CHECK_VALUE(
      inputs.size() == 1 && static_cast<int>(inputs.front().size()) == getSize(),
      "reduce_scatter over ",
      getSize(),
      " ranks needs a list of as many inputs");
  const auto& parts = inputs.front();
  int64_t longest = 0;
  for (const at::Tensor& part : parts) {
    check_on_device(part);
    longest = std::max(longest, part.numel());
  }
  TORCH_CHECK_VALUE(
      parts[getRank()].numel() == output.numel(),
      "reduce_scatter: this rank's output has ",
      output.numel(),
      " elements, its part ",
      parts[getRank()].numel());
  if (longest > 0) {
    std::vector<at::Tensor> rows;
    for (const at::Tensor& part : parts) {
      rows.push_back(padded(part, longest));
    }
    const at::Tensor whole = prepared(at::cat(rows), options.reduceOp);
    agree("reduce_scatter", whole, name_of(options.reduceOp));
    const at::Tensor mine = recorded::reduce_scatter(whole, name_of(options.reduceOp), ranks_);
    output.copy_(mine.narrow(0, 0, output.numel()).view(output.sizes()));
  }
  return done(c10d::OpType::REDUCE_SCATTER, outputs, options.timeout);
}

WorkPtr
ProcessGroup::_reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  const Profiled profiled("tpu:reduce_scatter_tensor", input);
  reduce_scatter_into(output, input, options.reduceOp);
  return done(c10d::OpType::_REDUCE_SCATTER_BASE, {output}, options.timeout);
}

WorkPtr ProcessGroup::reduce_scatter_tensor_coalesced(
    std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs, const c10d::ReduceScatterOptions& options) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  const Profiled profiled("tpu:reduce_scatter_tensor", inputs);
  for (size_t i = 0; i < inputs.size(); ++i) {
    reduce_scatter_into(outputs.at(i), inputs[i], options.reduceOp);
  }
  return done(c10d::OpType::REDUCE_SCATTER_TENSOR_COALESCED, outputs, options.timeout);
}

void ProcessGroup::exchange(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs) {
  // Every rank must launch the same program, so the longest part of all is agreed on: split sizes are data.
  int64_t longest = 1;
  for (int rank = 0; rank < getSize(); ++rank) {
    longest = std::max({longest, outputs[rank].numel(), inputs[rank].numel()});
  }
  const auto bucket = static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(longest)));
  const at::Tensor mine = at::full({1}, bucket, inputs.front().options().dtype(at::kLong));
  agree("all_to_all of parts", mine);
  const at::Tensor agreed = recorded::all_reduce(mine, "max", ranks_);
  std::vector<int64_t> sizes;
  for (const at::Tensor& input : inputs) {
    sizes.push_back(input.numel());
  }
  const at::Tensor sent = at::tensor(sizes, at::kLong).to(mine.device());
  agree("all_to_all of sizes", sent);
  const at::Tensor told = at::cat({agreed, recorded::all_to_all(sent, ranks_)}).cpu();
  const int64_t* const sizes_told = told.const_data_ptr<int64_t>();
  const int64_t length = sizes_told[0];
  for (int rank = 0; rank < getSize(); ++rank) {
    TORCH_CHECK_VALUE(
        sizes_told[1 + rank] == outputs[rank].numel(),
        "all_to_all: rank ",
        ranks_[rank],
        " sends ",
        sizes_told[1 + rank],
        " elements to rank ",
        ranks_[getRank()],
        ", which expects ",
        outputs[rank].numel(),
        ": the output's split sizes must be what the other ranks send");
  }
  std::vector<at::Tensor> rows;
  for (const at::Tensor& input : inputs) {
    rows.push_back(padded(input, length));
  }
  const at::Tensor whole = at::stack(rows);
  agree("all_to_all", whole);
  const at::Tensor exchanged = recorded::all_to_all(whole, ranks_);
  for (int rank = 0; rank < getSize(); ++rank) {
    if (outputs[rank].numel() != 0) {
      outputs[rank].copy_(exchanged.select(0, rank).narrow(0, 0, outputs[rank].numel()).view(outputs[rank].sizes()));
    }
  }
}

WorkPtr ProcessGroup::alltoall_base(
    at::Tensor& output,
    at::Tensor& input,
    std::vector<int64_t>& output_splits,
    std::vector<int64_t>& input_splits,
    const c10d::AllToAllOptions& options) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  const Profiled profiled("tpu:all_to_all", input);
  check_on_device(input);
  check_on_device(output);
  if (output_splits.empty() && input_splits.empty()) {
    TORCH_CHECK_VALUE(
        input.dim() > 0 && input.size(0) % getSize() == 0 && output.numel() == input.numel(),
        "all_to_all of ",
        input.sizes(),
        " into ",
        output.sizes(),
        " over ",
        getSize(),
        " ranks: dim 0 must be divisible, or give split sizes");
    if (input.numel() != 0) {
      agree("all_to_all", input);
      output.copy_(recorded::all_to_all(input, ranks_).view(output.sizes()));
    }
    return done(c10d::OpType::ALLTOALL_BASE, {output}, options.timeout);
  }
  const auto parts = [&](const at::Tensor& tensor, const std::vector<int64_t>& splits) {
    if (splits.empty()) {
      TORCH_CHECK_VALUE(
          tensor.size(0) % getSize() == 0,
          "all_to_all over ",
          getSize(),
          " ranks: dim 0 of ",
          tensor.sizes(),
          " is not divisible, give its split sizes");
      return tensor.chunk(getSize());
    }
    TORCH_CHECK_VALUE(
        static_cast<int>(splits.size()) == getSize() &&
            std::accumulate(splits.begin(), splits.end(), int64_t{0}) == tensor.size(0),
        "all_to_all: the splits ",
        splits,
        " are not ",
        getSize(),
        " that add up to ",
        tensor.size(0),
        ", the tensor's first dim");
    return tensor.split_with_sizes(splits);
  };
  exchange(parts(output, output_splits), parts(input, input_splits));
  return done(c10d::OpType::ALLTOALL_BASE, {output}, options.timeout);
}

WorkPtr ProcessGroup::alltoall(
    std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs, const c10d::AllToAllOptions& options) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  const Profiled profiled("tpu:all_to_all", inputs);
  TORCH_CHECK_VALUE(
      static_cast<int>(inputs.size()) == getSize() && outputs.size() == inputs.size(),
      "all_to_all over ",
      getSize(),
      " ranks needs as many inputs and outputs");
  exchange(outputs, inputs);
  return done(c10d::OpType::ALLTOALL, outputs, options.timeout);
}

WorkPtr ProcessGroup::endCoalescing() {
  std::vector<at::Tensor> tensors;
  for (const auto& transfer : transfers_) {
    tensors.push_back(transfer.tensor);
  }
  record_transfers();
  return done(c10d::OpType::COALESCED, std::move(tensors), last_transfer_, c10d::kUnsetTimeout);
}

void ProcessGroup::record_transfers() {
  const at::AutoDispatchBelowADInplaceOrView guard;
  auto transfers = std::exchange(transfers_, {});
  const auto order = [](const Transfer& transfer) {
    return std::tuple(transfer.source == kAnySource, transfer.source, transfer.destination);
  };
  std::stable_sort(transfers.begin(), transfers.end(), [&](const Transfer& some, const Transfer& other) {
    return order(some) < order(other);
  });
  for (auto& transfer : transfers) {
    if (transfer.source == kAnySource) {
      transfer.source = find_source();
    }
    last_transfer_ = record(transfer);
    transfer.work->recorded(last_transfer_, transfer.source);
  }
}

int ProcessGroup::find_source() {
  std::vector<int> sources;
  std::vector<std::string> groups;
  for (int rank = 0; rank < getSize(); ++rank) {
    if (rank != getRank()) {
      sources.push_back(rank);
      const auto [first, last] = std::minmax(ranks_[rank], ranks_[getRank()]);
      groups.push_back(c10::str(first, ",", last));
    }
  }
  py::gil_scoped_acquire gil;
  const auto found = py::module_::import("tpu_backend.distributed.agreement")
                         .attr("find_sender")(groups, std::chrono::duration<double>(options_->timeout).count());
  return sources.at(found.cast<size_t>());
}

Call ProcessGroup::record(const Transfer& transfer) {
  if (transfer.source == transfer.destination) {
    TORCH_CHECK_VALUE(
        !sent_to_self_.empty(),
        "irecv from this rank itself, which has sent nothing to itself: call isend before the wait");
    transfer.tensor.copy_(sent_to_self_.front());
    sent_to_self_.pop_front();
    return last_call_;
  }
  if (transfer.tensor.numel() == 0) {
    return last_call_;
  }
  TORCH_CHECK(
      !is_in_region(),
      "send and recv in a region (torch.tpu.spmd), whose program is the same on all ranks: call them outside of it, "
      "or use a collective such as all_to_all");
  const bool is_from_any = transfer.work->retrieveOpType() == c10d::OpType::RECVANYSOURCE;
  const char* const name = getRank() == transfer.source ? "tpu:send" : is_from_any ? "tpu:recvAnySource" : "tpu:recv";
  const Profiled profiled(name, transfer.tensor);
  const int64_t source = ranks_[transfer.source];
  const int64_t destination = ranks_[transfer.destination];
  // One mesh, and one order of calls, for both directions and for collectives of the two.
  const auto [first, last] = std::minmax(source, destination);
  const at::Tensor& tensor = transfer.tensor;
  auto call = agree(
      {first, last},
      c10::str(
          "send(",
          c10::toString(tensor.scalar_type()),
          tensor.sizes(),
          ", from rank ",
          source,
          " to rank ",
          destination,
          transfer.tag == 0 ? "" : c10::str(", tag ", transfer.tag),
          ")"));
  const at::Tensor arrived = recorded::send_receive(tensor, source == first ? 0 : 1, {first, last});
  if (getRank() == transfer.destination) {
    transfer.tensor.copy_(arrived);
  }
  return call;
}

WorkPtr ProcessGroup::transfer(Transfer transfer, c10d::OpType op) {
  const auto self =
      c10::weak_intrusive_ptr<c10d::Backend>(c10::intrusive_ptr<c10d::Backend>::unsafe_reclaim_from_nonowning(this));
  transfer.work = c10::make_intrusive<Work>(op, getRank(), transfer.tensor, options_->timeout, self);
  transfers_.push_back(transfer);
  return transfer.work;
}

WorkPtr ProcessGroup::send(std::vector<at::Tensor>& tensors, int destination, int tag) {
  const at::Tensor& tensor = only(tensors);
  if (destination == getRank()) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    sent_to_self_.push_back(tensor.clone());
    return done(c10d::OpType::SEND, tensors, c10d::kUnsetTimeout);
  }
  return transfer({tensor, getRank(), destination, tag}, c10d::OpType::SEND);
}

WorkPtr ProcessGroup::recv(std::vector<at::Tensor>& tensors, int source, int tag) {
  return transfer({only(tensors), source, getRank(), tag}, c10d::OpType::RECV);
}

WorkPtr ProcessGroup::recvAnysource(std::vector<at::Tensor>& tensors, int tag) {
  return transfer({only(tensors), kAnySource, getRank(), tag}, c10d::OpType::RECVANYSOURCE);
}

WorkPtr ProcessGroup::barrier(const c10d::BarrierOptions& options) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  const Profiled profiled("tpu:barrier", {});
  const at::Tensor token =
      at::ones({1}, at::TensorOptions().device(at::Device(kDeviceType, Device::get().current())).dtype(at::kInt));
  reduce_into(token, token, c10d::ReduceOp::SUM);
  return done(c10d::OpType::BARRIER, {token}, options.timeout, /*waits=*/true);
}

} // namespace tpu
