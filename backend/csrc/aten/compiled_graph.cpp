#include "aten/compiled_graph.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/List.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>

#include <algorithm>

namespace tpu {
namespace {

using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

class CompiledGraphBackward : public torch::autograd::Node {
 public:
  CompiledGraphBackward(GraphOperator backward, torch::autograd::edge_list&& edges)
      : Node(std::move(edges)), backward_(std::move(backward)),
        was_deterministic_(at::globalContext().deterministicAlgorithms()) {}

  void keep(const at::Tensor& tensor, bool is_output) { kept_.emplace_back(tensor, is_output); }

  std::string name() const override {
    return "CompiledFunctionBackward"; // as AOTAutograd's
  }

  variable_list apply(variable_list&& gradients) override {
    static const auto kTransforms =
        c10::functorch_transforms_ks | c10::DispatchKeySet(c10::DispatchKey::FuncTorchDynamicLayerFrontMode);
    TORCH_CHECK(
        !c10::impl::tls_local_dispatch_key_set().included_.has_any(kTransforms),
        "the backward pass of a compiled function cannot run within vmap, grad or vjp; put them inside torch.compile");
    TORCH_CHECK(
        was_deterministic_ || !at::globalContext().deterministicAlgorithms(),
        "the backward pass of a compiled function runs with torch.use_deterministic_algorithms(True), and its forward "
        "pass ran without; set it before the forward pass");
    variable_list inputs;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      inputs.reserve(kept_.size() + gradients.size());
      for (const auto& kept : kept_) {
        inputs.push_back(kept.unpack(getptr()));
      }
    }
    for (size_t i = 0; i < gradients.size(); ++i) {
      inputs.push_back(gradients[i].defined() ? gradients[i] : input_metadata(i).zeros_like());
    }
    auto results = backward_(inputs);
    if (torch::autograd::GradMode::is_enabled()) { // create_graph=True
      const auto error = c10::make_intrusive<torch::autograd::Error>(
          "torch.compile with aot_autograd does not currently support double backward",
          torch::autograd::collect_next_edges(inputs));
      for (auto& result : results) {
        if (result.defined()) {
          result = result.detach();
          torch::autograd::set_history(result, error);
        }
      }
    }
    return results;
  }

  void release_variables() override {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& kept : kept_) {
      kept.reset_data();
    }
  }

  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override {
    args.collect(c10::toString(backward_.op.operator_name()));
    args.collect(kept_, /*is_output=*/false);
  }

  variable_list
  apply_with_saved(const variable_list& gradients, torch::dynamo::autograd::SwapSavedVariables& saved) override {
    saved.before(kept_);
    auto results = apply(variable_list(gradients));
    saved.after(kept_);
    return results;
  }

 private:
  GraphOperator backward_;
  bool was_deterministic_;
  std::vector<SavedVariable> kept_;
};

} // namespace

GraphOperator::GraphOperator(const std::string& name, std::vector<std::optional<GraphValue>> returned)
    : op(c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), "")), returned(std::move(returned)) {}

variable_list GraphOperator::operator()(at::ArrayRef<at::Tensor> inputs) const {
  at::AutoDispatchBelowADInplaceOrView guard;
  torch::jit::Stack stack;
  stack.emplace_back(c10::List<at::Tensor>(inputs));
  stack.emplace_back(c10::List<int64_t>());
  op.callBoxed(stack);
  const auto results = stack.front().toTensorList();
  variable_list values;
  values.reserve(returned.size());
  for (const auto& value : returned) {
    if (!value.has_value()) {
      values.emplace_back();
      continue;
    }
    const auto& [place, view] = *value;
    if (place >= 0) {
      values.push_back(results.get(place));
    } else if (const at::Tensor& input = inputs[-1 - place]; view.has_value()) {
      const auto& [sizes, strides, offset] = *view;
      values.push_back(input.as_strided(sizes, strides, input.storage_offset() + offset));
      // Autograd looks there for what was written since.
      torch::autograd::impl::set_version_counter(values.back(), torch::autograd::impl::version_counter(input));
    } else {
      values.push_back(input);
    }
  }
  return values;
}

CompiledGraph::CompiledGraph(
    GraphOperator forward, std::vector<bool> differentiable, std::optional<GraphOperator> backward)
    : forward_(std::move(forward)), differentiable_(std::move(differentiable)), backward_(std::move(backward)) {}

variable_list CompiledGraph::operator()(at::ArrayRef<at::Tensor> inputs) const {
  auto values = forward_(inputs);
  const size_t num_outputs = differentiable_.size();
  if (backward_.has_value()) {
    // An input that gets no gradient is no part of the graph, as if it were detached.
    variable_list differentiated(inputs.size());
    for (size_t i = 0; i < inputs.size(); ++i) {
      if (backward_->returned[i].has_value()) {
        differentiated[i] = inputs[i];
      }
    }
    const auto node =
        c10::make_intrusive<CompiledGraphBackward>(*backward_, torch::autograd::collect_next_edges(differentiated));
    for (size_t i = 0; i < num_outputs; ++i) {
      if (differentiable_[i]) {
        torch::autograd::set_history(values[i], node);
      }
    }
    for (size_t i = num_outputs; i < values.size(); ++i) {
      node->keep(values[i], /*is_output=*/values[i].grad_fn() == node);
    }
  }
  values.resize(num_outputs);
  return values;
}

} // namespace tpu
