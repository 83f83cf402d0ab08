#include "record/meta_call.h"

#include "record/meta_kernels.h"

#include <ATen/Context.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <map>
#include <string_view>

namespace tpu {
namespace {

// What a call returned, lists flattened.
std::vector<MetaTensor> flatten_returns(const torch::jit::Stack& stack) {
  std::vector<MetaTensor> tensors;
  for (size_t slot = 0; slot < stack.size(); ++slot) {
    const auto& value = stack[slot];
    if (value.isTensor() || value.isNone()) {
      tensors.push_back({value.isNone() ? at::Tensor() : value.toTensor(), static_cast<int>(slot), -1});
    } else if (value.isTensorList()) {
      int element = 0;
      for (const at::Tensor& item : value.toTensorList()) {
        tensors.push_back({item, static_cast<int>(slot), element++});
      }
    } else {
      TORCH_CHECK(false, "a lowered op must return tensors, got ", value.tagKind());
    }
  }
  return tensors;
}

// A few meta kernels (median, mode, histc) speak for CUDA's and raise where those are not deterministic; XLA's programs
// for TPU and CPU always are.  The flag is the process's, so it is lifted for such a kernel alone, once a signature.
class DeterminismIsGiven {
 public:
  DeterminismIsGiven()
      : asked_(at::globalContext().deterministicAlgorithms()),
        warn_only_(at::globalContext().deterministicAlgorithmsWarnOnly()) {
    if (asked_) {
      at::globalContext().setDeterministicAlgorithms(false, false);
    }
  }
  ~DeterminismIsGiven() {
    if (asked_) {
      at::globalContext().setDeterministicAlgorithms(true, warn_only_);
    }
  }
  DeterminismIsGiven(const DeterminismIsGiven&) = delete;
  DeterminismIsGiven& operator=(const DeterminismIsGiven&) = delete;

 private:
  bool asked_, warn_only_;
};

std::optional<std::vector<MetaTensor>> call_kernel(const c10::OperatorHandle& handle, torch::jit::Stack stack) {
  at::AutoDispatchBelowADInplaceOrView guard;
  if (const c10::KernelFunction* kernel = meta_kernel(handle.operator_name())) {
    kernel->callBoxed(handle, c10::DispatchKeySet(c10::DispatchKey::Meta), &stack);
    return flatten_returns(stack);
  }
  const torch::jit::Stack arguments = at::globalContext().deterministicAlgorithms() ? stack : torch::jit::Stack();
  try {
    handle.callBoxed(stack);
  } catch (const c10::NotImplementedError&) {
    return std::nullopt;
  } catch (pybind11::error_already_set& error) { // a meta kernel written in Python
    pybind11::gil_scoped_acquire gil;
    if (!arguments.empty() && std::string_view(error.what()).find("deterministic impl") != std::string_view::npos) {
      DeterminismIsGiven determinism;
      stack = arguments;
      handle.callBoxed(stack);
      return flatten_returns(stack);
    }
    if (!error.matches(PyExc_NotImplementedError)) {
      throw;
    }
    return std::nullopt;
  }
  return flatten_returns(stack);
}

// The elements of the lists, grouped by shapes, strides and dtypes.
struct ElementGroups {
  std::vector<size_t> first;    // by group: its first element
  std::vector<size_t> group_of; // by element
};

// For an operator that does the same to each element (`_foreach_add_`).  nullopt if an element's result may depend on
// more than its shapes, strides and dtypes.
std::optional<ElementGroups> grouped_elements(const c10::OperatorHandle& handle, const torch::jit::Stack& stack) {
  if (!handle.operator_name().name.starts_with("aten::_foreach_")) {
    return std::nullopt;
  }
  std::vector<c10::List<at::Tensor>> lists;
  for (const auto& value : stack) {
    if (value.isTensorList()) {
      lists.push_back(value.toTensorList());
    } else if (value.isList()) { // a number for each element
      return std::nullopt;
    }
  }
  const auto is_longer_or_shorter = [&](const auto& list) {
    return list.size() != lists.front().size();
  };
  if (lists.empty() || std::any_of(lists.begin(), lists.end(), is_longer_or_shorter)) {
    return std::nullopt;
  }
  ElementGroups groups;
  std::map<std::vector<int64_t>, size_t> known;
  for (size_t element = 0; element < lists.front().size(); ++element) {
    std::vector<int64_t> geometry;
    for (const auto& list : lists) {
      const at::Tensor tensor = list.get(element);
      if (!tensor.is_meta()) {
        return std::nullopt;
      }
      geometry.push_back(static_cast<int64_t>(tensor.scalar_type()));
      geometry.push_back(tensor.dim());
      geometry.insert(geometry.end(), tensor.sizes().begin(), tensor.sizes().end());
      geometry.insert(geometry.end(), tensor.strides().begin(), tensor.strides().end());
    }
    const auto [found, is_new] = known.emplace(std::move(geometry), groups.first.size());
    if (is_new) {
      groups.first.push_back(element);
    }
    groups.group_of.push_back(found->second);
  }
  return groups;
}

} // namespace

std::optional<std::vector<MetaTensor>> call_meta(const c10::OperatorHandle& handle, torch::jit::Stack stack) {
  // PyTorch asks about one element after the other: 30 ms for 300 parameters.  So it is asked about one of each group.
  const auto groups = grouped_elements(handle, stack);
  if (!groups || groups->first.size() == groups->group_of.size()) {
    return call_kernel(handle, std::move(stack));
  }
  for (auto& value : stack) {
    if (value.isTensorList()) {
      const auto whole = value.toTensorList();
      c10::List<at::Tensor> shorter;
      for (const size_t element : groups->first) {
        shorter.push_back(whole.get(element));
      }
      value = std::move(shorter);
    }
  }
  const auto returned = call_kernel(handle, std::move(stack));
  if (!returned) {
    return std::nullopt;
  }
  std::vector<MetaTensor> tensors;
  for (auto begin = returned->begin(); begin != returned->end();) { // each slot is a list of one element a group
    const auto end = begin + static_cast<std::ptrdiff_t>(groups->first.size());
    for (size_t element = 0; element < groups->group_of.size(); ++element) {
      const auto& result = *(begin + static_cast<std::ptrdiff_t>(groups->group_of[element]));
      tensors.push_back({result.tensor, result.slot, static_cast<int>(element)});
    }
    begin = end;
  }
  return tensors;
}

} // namespace tpu
