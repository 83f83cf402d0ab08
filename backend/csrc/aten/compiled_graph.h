// Calls of ordinary graphs of torch.compile.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/variable.h>

#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace tpu {

// A value that a graph returns: a result of its operator, by its place; or, as -1 - place, an input; or a view of that
// input: sizes, strides, and the offset from where the input begins.
using GraphView = std::tuple<std::vector<int64_t>, std::vector<int64_t>, int64_t>;
using GraphValue = std::pair<int, std::optional<GraphView>>;

// What a graph became: an operator (Tensor[] tensors, int[] sizes) -> Tensor[], and the values that are made of it.
struct GraphOperator {
  GraphOperator(const std::string& name, std::vector<std::optional<GraphValue>> returned);
  // Where there is no value, the tensor is undefined.
  torch::autograd::variable_list operator()(at::ArrayRef<at::Tensor> inputs) const;

  c10::OperatorHandle op;
  std::vector<std::optional<GraphValue>> returned;
};

// A call of a graph of torch.compile, whose backward is one node of autograd. For graphs whose inputs and outputs are
// ordinary tensors, of which no two share memory and none is written: see tpu_backend/compiled/ordinary.py.
class CompiledGraph {
 public:
  // `forward` returns the outputs and after them what is kept for `backward`, which takes these and the gradients of
  // the outputs that are `differentiable`, and returns the gradients of the inputs.
  CompiledGraph(GraphOperator forward, std::vector<bool> differentiable, std::optional<GraphOperator> backward);
  torch::autograd::variable_list operator()(at::ArrayRef<at::Tensor> inputs) const;

 private:
  GraphOperator forward_;
  std::vector<bool> differentiable_;
  std::optional<GraphOperator> backward_;
};

} // namespace tpu
