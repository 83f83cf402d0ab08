#include "record/record.h"

#include "device/device.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <c10/core/AutogradState.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <tuple>

namespace tpu {
namespace {

// A generator of the device brings a call here whose tensors are all on the CPU.
void refuse_tensors_beside_our_generator(c10::ArrayRef<c10::IValue> args) {
  const auto is_on_cpu = [](const c10::IValue& value) {
    return value.isTensor() && value.toTensor().defined() && value.toTensor().is_cpu();
  };
  const auto is_our_generator = [](const c10::IValue& value) {
    return value.isGenerator() && value.toGenerator().device().type() == kDeviceType;
  };
  TORCH_CHECK(
      std::none_of(args.begin(), args.end(), is_our_generator) || std::none_of(args.begin(), args.end(), is_on_cpu),
      "Expected a 'cpu' device type for generator but found 'tpu'; make one with torch.Generator(), or the tensor with "
      "device=\"tpu\"");
}

c10::DeviceIndex device_of(c10::ArrayRef<c10::IValue> args) {
  for (const auto& value : args) {
    if (value.isTensor() && value.toTensor().defined() && value.toTensor().device().type() == kDeviceType) {
      return value.toTensor().device().index();
    }
    if (value.isTensorList() && !value.toTensorList().empty()) {
      return value.toTensorList().get(0).device().index();
    }
  }
  refuse_tensors_beside_our_generator(args);
  return Device::get().current();
}

at::Generator generator_of(c10::ArrayRef<c10::IValue> args, c10::DeviceIndex device) {
  for (const auto& value : args) {
    if (value.isGenerator()) {
      auto generator = value.toGenerator();
      TORCH_CHECK(
          generator.device().type() == kDeviceType,
          "Expected a 'tpu' device type for generator but found '",
          generator.device().type(),
          "'; make one with torch.Generator(\"tpu\")");
      return generator;
    }
  }
  return Device::get().default_generator(device);
}

// PyTorch's own refusal: what such a call would compute depends on the order of its loop.
void check_partial_overlap(const Signature& signature, c10::ArrayRef<c10::IValue> arguments) {
  for (const auto& output : signature.outputs) {
    if (output.written_arg < 0) {
      continue;
    }
    const at::Tensor target = written_tensor(output, arguments);
    for (const auto& value : arguments) {
      if (value.isTensor() && value.toTensor().defined() && value.toTensor().is_alias_of(target)) {
        at::assert_no_partial_overlap(target, value.toTensor());
      }
    }
  }
}

// Autograd would run a backward pass of this device in a thread of its own, as it does for devices whose kernels take
// time.  Here an operation is only recorded, and to hand over to that thread, and the GIL to and fro between the two,
// took a small step 0.2 to 0.3 ms of 0.85.  Said once a thread, so that what the user sets afterwards holds; not where
// it is off or grad mode is: inference mode and the like restore what they found.
void keep_backward_in_this_thread() {
  static thread_local bool is_said = false;
  if (is_said) {
    return;
  }
  auto& state = c10::AutogradState::get_tls_state();
  if (state.get_grad_mode() && state.get_multithreading_enabled()) {
    is_said = true;
    state.set_multithreading_enabled(false);
  }
}

// PyTorch leaves it to a device's kernels to say that the elements of a list have changed, so that autograd refuses
// what was saved of them: of other arguments it says so itself.
void bump_versions_of_lists(const OpInfo& op, c10::ArrayRef<c10::IValue> arguments) {
  for (size_t i = 0; i < op.args.size(); ++i) {
    if (op.args[i].is_written && arguments[i].isTensorList()) {
      for (const at::Tensor& element : arguments[i].toTensorVector()) {
        element.unsafeGetTensorImpl()->bump_version();
      }
    }
  }
}

// Refuses a result that is resized and shares memory with an input: that would take another shape before it is read.
void check_resized_apart(const Signature& signature, c10::ArrayRef<c10::IValue> arguments) {
  for (const auto& [arg, sizes, strides] : signature.out_resizes) {
    const at::Tensor& resized = arguments[arg].toTensor();
    for (size_t i = 0; i < arguments.size(); ++i) {
      if (arguments[i].isTensor() && static_cast<int>(i) != arg && arguments[i].toTensor().defined()) {
        at::assert_no_overlap(resized, arguments[i].toTensor());
      } else if (arguments[i].isTensorList()) {
        for (const at::Tensor& element : arguments[i].toTensorVector()) {
          at::assert_no_overlap(resized, element);
        }
      }
    }
  }
}

// Whether PyTorch takes `x[mask] = one value` for a fill, which a mask that is `x` itself may guide.
bool is_masked_fill(const OpInfo& op, c10::ArrayRef<c10::IValue> arguments) {
  if (op.args.size() < 4 || !arguments[1].isOptionalTensorList() || !arguments[2].isTensor()) {
    return false;
  }
  int num_given = 0;
  for (const std::optional<at::Tensor>& index : arguments[1].toOptionalTensorList()) {
    if (index.has_value() && index->defined()) {
      num_given += index->scalar_type() == c10::kBool || index->scalar_type() == c10::kByte ? 1 : 2;
    }
  }
  return num_given == 1 && arguments[2].toTensor().numel() == 1 && !arguments[3].toBool();
}

// PyTorch's own refusal too: what is written by index shares no memory with the indices and values.
void check_apart(const OpInfo& op, c10::ArrayRef<c10::IValue> arguments) {
  const auto written = std::find_if(op.args.begin(), op.args.end(), [](const ArgInfo& arg) { return arg.is_written; });
  const auto place = written - op.args.begin();
  const at::Tensor& target = arguments[place].toTensor();
  const auto check = [&](const at::Tensor& tensor) {
    if (tensor.defined() && tensor.is_alias_of(target)) {
      at::assert_no_overlap(target, tensor);
    }
  };
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (static_cast<ptrdiff_t>(i) == place) {
      continue;
    }
    if (arguments[i].isTensor()) {
      check(arguments[i].toTensor());
    } else if (arguments[i].isOptionalTensorList()) {
      for (const std::optional<at::Tensor>& index : arguments[i].toOptionalTensorList()) {
        check(index.value_or(at::Tensor()));
      }
    } else if (arguments[i].isTensorList()) {
      for (const at::Tensor& index : arguments[i].toTensorVector()) {
        check(index);
      }
    }
  }
}

// Takes the arguments off the stack and puts the returns on it; list returns are gathered again.
void return_results(
    const OpInfo& op, const Signature& signature, c10::ArrayRef<at::Tensor> results, torch::jit::Stack& stack) {
  const auto num_returns = op.returned_arg.size();
  if (num_returns == 1 && results.size() == 1 && signature.outputs[0].element < 0) { // nearly every op
    torch::jit::drop(stack, op.args.size());
    stack.emplace_back(results[0]);
    return;
  }
  torch::jit::Stack returns;
  for (size_t slot = 0; slot < num_returns; ++slot) {
    const bool is_list = op.handle.schema().returns()[slot].type()->kind() == c10::TypeKind::ListType;
    c10::List<at::Tensor> list;
    at::Tensor single;
    for (size_t i = 0; i < results.size(); ++i) {
      if (signature.outputs[i].return_slot == static_cast<int>(slot)) {
        single = results[i];
        if (is_list) {
          list.push_back(results[i]);
        }
      }
    }
    returns.push_back(is_list ? c10::IValue(std::move(list)) : c10::IValue(std::move(single)));
  }
  torch::jit::drop(stack, op.args.size());
  for (auto& value : returns) {
    stack.push_back(std::move(value));
  }
}

// Whether no two of the tensors that a call takes share an element, but for equal views in one place of several lists.
// Then it may write several parts of one buffer at once: FSDP2's gradients are such parts, and DDP's in their buckets.
bool are_disjoint(c10::ArrayRef<c10::IValue> arguments) {
  struct Range {
    at::Tensor tensor;
    int element; // of a list; -1: of none
    int64_t begin, end;

    bool is_same_view(const Range& other) const {
      return element >= 0 && element == other.element && begin == other.begin &&
          tensor.scalar_type() == other.tensor.scalar_type() && tensor.sizes() == other.tensor.sizes() &&
          tensor.strides() == other.tensor.strides();
    }
  };
  std::vector<Range> ranges;
  const auto add = [&](const at::Tensor& tensor, int element) {
    if (!tensor.defined() || tensor.numel() == 0 || tensor.device().type() != kDeviceType) {
      return;
    }
    int64_t end = tensor.storage_offset() + 1;
    for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
      end += (tensor.size(dim) - 1) * tensor.stride(dim);
    }
    const auto size = static_cast<int64_t>(tensor.element_size());
    ranges.push_back({tensor, element, tensor.storage_offset() * size, end * size});
  };
  for (const c10::IValue& argument : arguments) {
    if (argument.isTensor()) {
      add(argument.toTensor(), -1);
    } else if (argument.isTensorList()) {
      int element = 0;
      for (const at::Tensor& tensor : argument.toTensorVector()) {
        add(tensor, element++);
      }
    } else if (argument.isOptionalTensorList()) {
      return false;
    }
  }
  const auto place = [](const Range& range) {
    return std::tuple(range.tensor.storage().unsafeGetStorageImpl(), range.begin, range.end);
  };
  std::sort(
      ranges.begin(), ranges.end(), [&](const Range& one, const Range& other) { return place(one) < place(other); });
  return std::adjacent_find(ranges.begin(), ranges.end(), [](const Range& one, const Range& other) {
           return one.tensor.is_alias_of(other.tensor) && other.begin < one.end && !one.is_same_view(other);
         }) == ranges.end();
}

// As PyTorch does it for devices that have no kernel of their own.
void run_by_parts(const OpInfo& op, torch::jit::Stack* stack) {
  if (op.has_parts) {
    op.handle.callBoxedForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd, *stack);
  } else {
    cpu_fallback(op.handle, stack);
  }
}

// A form that no one program can express: its shapes depend on data, it has no lowering, or arguments are wrong.
void run_unrecorded(const OpInfo& op, const Signature& signature, torch::jit::Stack* stack) {
  if (op.data_dependent.has_value()) {
    op.data_dependent->callBoxed(stack);
    return;
  }
  cpu_fallback(op.handle, stack);
  if (!signature.lowering_failure.empty()) { // and yet the arguments are right: a fault of ours
    TORCH_WARN(signature.lowering_failure, "\nPlease report this. The CPU has computed it.");
  }
}

// A few operators (`mm`, `linalg_solve_triangular`) take the lazy bits of conj() as they come, where PyTorch resolves
// them for all others: BLAS has a flag for it.  Here they are resolved like the rest, and XLA fuses what that takes.
void resolve_lazy_bits(const OpInfo& op, torch::jit::Stack& stack) {
  const size_t first = stack.size() - op.args.size();
  for (size_t i = 0; i < op.args.size(); ++i) {
    c10::IValue& value = stack[first + i];
    if (value.isTensor() && !op.args[i].is_out && value.toTensor().defined() &&
        (value.toTensor().is_conj() || value.toTensor().is_neg())) {
      value = value.toTensor().resolve_conj().resolve_neg();
    }
  }
}

} // namespace

void RecordKernel::operator()(const c10::OperatorHandle&, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const OpInfo& op = *op_;
  keep_backward_in_this_thread();
  resolve_lazy_bits(op, *stack);
  const auto arguments = torch::jit::last(*stack, op.args.size());
  const c10::DeviceIndex device = device_of(arguments);
  Stream& stream = Device::get().stream(device);
  if (op.check != nullptr) {
    op.check(arguments);
  }

  EncodedCall call;
  encode_call(op, arguments, device, call);
  const Signature* signature = find_signature(call);
  if (signature == nullptr) {
    signature = make_signature(op, arguments, call);
  }
  if (signature->on_cpu) {
    run_unrecorded(op, *signature, stack);
    return;
  }
  if (signature->by_parts) {
    run_by_parts(op, stack);
    return;
  }
  if (!signature->out_resizes.empty()) {
    check_resized_apart(*signature, arguments);
    for (const auto& [arg, sizes, strides] : signature->out_resizes) {
      const at::Tensor& out = arguments[arg].toTensor();
      at::native::resize_output(out, sizes);
      if (!strides.empty()) {
        out.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
      }
    }
    call.clear();
    encode_call(op, arguments, device, call);
    signature = find_signature(call);
    if (signature == nullptr) {
      signature = make_signature(op, arguments, call);
    }
    if (signature->on_cpu) {
      run_unrecorded(op, *signature, stack);
      return;
    }
  }
  check_numbers(*signature, call);
  if (op.is_pointwise) {
    check_partial_overlap(*signature, arguments);
  } else if (op.writes_apart && !is_masked_fill(op, arguments)) {
    check_apart(op, arguments);
  }
  if (op.num_draws > 0) {
    call.generator = generator_of(arguments, device);
    auto& generator = *call.generator.get<GeneratorImpl>();
    std::lock_guard<std::mutex> guard(generator.mutex_);
    call.numbers.push_back({.is_integer = true, .integer = static_cast<int64_t>(generator.current_seed())});
    call.numbers.push_back({.is_integer = true, .integer = static_cast<int64_t>(generator.take_offsets(op.num_draws))});
  }

  c10::SmallVector<at::Tensor, 4> results;
  c10::SmallVector<Buffer*, 4> buffers;
  for (const auto& output : signature->outputs) {
    if (output.undefined) {
      results.emplace_back();
      buffers.push_back(nullptr);
      continue;
    }
    results.push_back(
        output.written_arg >= 0
            ? written_tensor(output, arguments)
            : tensor_in(
                  make_storage(output.layout, device, signature->id), output.dtype, output.sizes, output.strides));
    buffers.push_back(output.skip ? nullptr : buffer_of(results.back()));
  }
  UserPlace place = signature->checked ? user_place() : UserPlace{};
  bool is_written_twice = false;
  bool may_move = false; // views that are disjoint now may overlap in a replay
  {
    StreamLock lock(stream.mutex());
    is_written_twice = buffers.size() > 1 && stream.is_written_twice({buffers.data(), buffers.size()});
    may_move = stream.sink()->moves_views();
  }
  if (is_written_twice && (may_move || !are_disjoint(arguments))) {
    run_by_parts(op, stack);
    return;
  }
  {
    StreamLock lock(stream.mutex());
    // Between collectives of their own ranks may run different programs.
    const bool is_alone = op.is_collective && !stream.sink()->joins_collectives();
    if (is_alone) {
      stream.cut_all(); // with nothing pending the lock is kept until the collective is detached
    }
    stream.append(*signature, call, {buffers.data(), buffers.size()}, std::move(place));
    if (cuts_after_each_op()) {
      stream.cut_after(*signature, {buffers.data(), buffers.size()});
    } else if (is_alone) {
      stream.cut();
    }
  }
  if (op.is_foreach) {
    bump_versions_of_lists(op, arguments);
  }
  return_results(op, *signature, results, *stack);
}

void cpu_fallback(const c10::OperatorHandle& handle, torch::jit::Stack* stack) {
  run_on_cpu(handle, stack, c10::DispatchKey::CPU);
}

void run_on_cpu(const c10::OperatorHandle& handle, torch::jit::Stack* stack, c10::DispatchKey kernel) {
  const auto& name = handle.schema().operator_name();
  Device::get().ensure_initialized();
  // raises where the arguments are wrong: that is no fallback
  at::native::cpu_fallback(handle, stack, /*error_on_views=*/false, kernel);
  Device::get().count_fallback(name.overload_name.empty() ? name.name : name.name + "." + name.overload_name);
}

} // namespace tpu

namespace {
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&tpu::cpu_fallback>());
}
} // namespace
