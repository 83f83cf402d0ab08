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
// for TPU and CPU always are.  The flag is the process's, so it is lifted for such a kernel alone, once a form.
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

// Which elements of the lists are of one form.
struct Forms {
  std::vector<size_t> first; // by form: the first element of it
  std::vector<size_t> form_of; // by element
};

// Of an operator that does the same to each element (`_foreach_add_`); nullopt where an element's result may depend on more than the
// shapes and dtypes there.
std::optional<Forms> forms_of(const c10::OperatorHandle& handle, const torch::jit::Stack& stack) {
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
  const auto is_longer_or_shorter = [&](const auto& list) { return list.size() != lists.front().size(); };
  if (lists.empty() || std::any_of(lists.begin(), lists.end(), is_longer_or_shorter)) {
    return std::nullopt;
  }
  Forms forms;
  std::map<std::vector<int64_t>, size_t> known;
  for (size_t element = 0; element < lists.front().size(); ++element) {
    std::vector<int64_t> form;
    for (const auto& list : lists) {
      const at::Tensor tensor = list.get(element);
      if (!tensor.is_meta()) {
        return std::nullopt;
      }
      form.push_back(static_cast<int64_t>(tensor.scalar_type()));
      form.push_back(tensor.dim());
      form.insert(form.end(), tensor.sizes().begin(), tensor.sizes().end());
      form.insert(form.end(), tensor.strides().begin(), tensor.strides().end());
    }
    const auto [found, is_new] = known.emplace(std::move(form), forms.first.size());
    if (is_new) {
      forms.first.push_back(element);
    }
    forms.form_of.push_back(found->second);
  }
  return forms;
}

} // namespace

std::optional<std::vector<MetaTensor>> call_meta(const c10::OperatorHandle& handle, torch::jit::Stack stack) {
  // PyTorch asks about one element after the other, of 300 parameters for 30 ms.
  const auto forms = forms_of(handle, stack);
  if (!forms || forms->first.size() == forms->form_of.size()) {
    return call_kernel(handle, std::move(stack));
  }
  for (auto& value : stack) {
    if (value.isTensorList()) {
      const auto whole = value.toTensorList();
      c10::List<at::Tensor> shorter;
      for (const size_t element : forms->first) {
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
  for (auto begin = returned->begin(); begin != returned->end();) { // each slot is a list of one element a form
    const auto end = begin + static_cast<std::ptrdiff_t>(forms->first.size());
    for (size_t element = 0; element < forms->form_of.size(); ++element) {
      const auto& result = *(begin + static_cast<std::ptrdiff_t>(forms->form_of[element]));
      tensors.push_back({result.tensor, result.slot, static_cast<int>(element)});
    }
    begin = end;
  }
  return tensors;
}

} // namespace tpu
