#include "record/op.h"

#include "aten/distributions.h"
#include "aten/division.h"
#include "record/record.h"

#include <torch/library.h>

#include <algorithm>
#include <deque>
#include <map>
#include <set>

namespace tpu {
namespace {

std::deque<OpInfo>& op_table() {
  static auto* table = new std::deque<OpInfo>;
  return *table;
}

// The kind of an argument, of what an optional holds, of a list's elements.
c10::TypeKind element_kind(c10::TypePtr type) {
  while (true) {
    if (auto optional = type->cast<c10::OptionalType>()) {
      type = optional->getElementType();
    } else if (auto list = type->cast<c10::ListType>()) {
      type = list->getElementType();
    } else {
      return type->kind();
    }
  }
}

bool is_number(const c10::TypePtr& type) {
  const auto kind = element_kind(type);
  return kind == c10::TypeKind::NumberType || kind == c10::TypeKind::FloatType || kind == c10::TypeKind::IntType ||
      kind == c10::TypeKind::SymIntType;
}

bool contains(const std::vector<std::string>& names, const std::string& name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

OpInfo describe(const c10::OperatorHandle& handle, const LoweredOp& lowered) {
  OpInfo op{
      static_cast<uint32_t>(op_table().size()), handle, lowered.table_name, {}, {}, lowered.num_draws, {}, {}, {}};
  op.check = distribution_check(handle.operator_name());
  if (op.check == nullptr) {
    op.check = division_check(handle.operator_name());
  }
  const auto& called = handle.operator_name().name;
  op.is_fill = called == "aten::fill_" || called == "aten::zero_" || called == "aten::scalar_tensor";
  op.has_parts = handle.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd);
  op.is_collective = handle.operator_name().name.starts_with("tpu_collective::");
  op.is_pointwise = handle.hasTag(at::Tag::pointwise);
  static const std::set<std::string> kWriteApart{
      "index_put_",
      "_index_put_impl_",
      "index_add_",
      "index_copy_",
      "index_fill_",
      "index_reduce_",
      "scatter_",
      "scatter_add_",
      "scatter_reduce_",
      "put_"};
  const std::string name = called.substr(called.find("::") + 2);
  const bool is_out =
      std::any_of(handle.schema().arguments().begin(), handle.schema().arguments().end(), [](const auto& argument) {
        return argument.is_out();
      });
  op.keeps_shape_of_out = is_out && (name == "arange" || name == "linspace" || name == "logspace" || name == "range");
  op.writes_apart = kWriteApart.contains(name) || (is_out && (name == "gather" || name == "index_select"));
  op.keeps_first_dtype = name == "huber_loss";
  static const std::set<std::string> kSums{"sum", "nansum", "prod", "cumsum", "cumprod"};
  op.sums_in_out_dtype = is_out && kSums.contains(name);
  op.is_foreach = handle.operator_name().name.starts_with("aten::_foreach_");
  const auto& schema = handle.schema();
  for (const auto& argument : schema.arguments()) {
    ArgInfo info;
    info.is_out = argument.is_out();
    info.is_written = argument.alias_info() != nullptr && argument.alias_info()->isWrite();
    info.is_read = !info.is_out && !contains(lowered.unread_args, argument.name());
    if (is_number(argument.real_type())) {
      const bool runtime = contains(lowered.runtime_args, argument.name()) ||
          (element_kind(argument.real_type()) == c10::TypeKind::NumberType &&
           !contains(lowered.static_args, argument.name()));
      info.policy = runtime ? NumberPolicy::Runtime : NumberPolicy::Static;
      info.zero_or_one_static = argument.name() == "alpha" || argument.name() == "beta";
    }
    if (const auto found = lowered.fits.find(argument.name()); found != lowered.fits.end()) {
      info.fits = found->second == "opmath" ? Fits::Opmath : found->second == "written" ? Fits::Written : Fits::Result;
    }
    if (argument.name() == "grads" && info.is_written) {
      info.written_with = schema.argumentIndexWithName("grad_scale").value_or(-1);
    }
    op.args.push_back(info);
  }
  std::vector<bool> returned(schema.arguments().size(), false);
  for (const auto& result : schema.returns()) {
    int written = -1;
    if (result.alias_info() != nullptr && result.alias_info()->isWrite()) {
      for (size_t i = 0; i < schema.arguments().size(); ++i) {
        const auto* alias = schema.arguments()[i].alias_info();
        if (alias != nullptr && alias->isWrite() && alias->beforeSets() == result.alias_info()->beforeSets()) {
          written = static_cast<int>(i);
          returned[i] = true;
        }
      }
    }
    op.returned_arg.push_back(written);
  }
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    const auto* alias = schema.arguments()[i].alias_info();
    if (alias != nullptr && alias->isWrite() && !returned[i]) {
      op.silently_written.push_back(static_cast<int>(i));
    }
  }
  const auto dot = lowered.table_name.find('.');
  const std::string base =
      std::string(handle.schema().getNamespace().value_or("aten")) + "::" + lowered.table_name.substr(0, dot);
  const std::string overload = dot == std::string::npos ? "" : lowered.table_name.substr(dot + 1);
  if (auto found = c10::Dispatcher::singleton().findSchema({base, overload})) {
    if (found->operator_name() != handle.operator_name()) {
      op.functional = *found;
    }
  }
  op.data_dependent =
      c10::Dispatcher::singleton().findSchema({"tpu::dynamic_" + name, handle.operator_name().overload_name});
  return op;
}

} // namespace

void register_lowered_ops(const std::vector<LoweredOp>& ops) {
  // The registrations live as long as the process.
  static auto* libraries = new std::map<std::string, std::unique_ptr<torch::Library>>;
  for (const auto& lowered : ops) {
    const auto dot = lowered.overload.find('.');
    const std::string name = lowered.overload.substr(0, dot);
    const std::string overload = dot == std::string::npos ? "" : lowered.overload.substr(dot + 1);
    auto handle = c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str());
    op_table().push_back(describe(handle, lowered));
    auto& library = (*libraries)[lowered.overload.substr(0, lowered.overload.find("::"))];
    if (library == nullptr) {
      library = std::make_unique<torch::Library>(
          torch::Library::IMPL,
          lowered.overload.substr(0, lowered.overload.find("::")),
          c10::DispatchKey::PrivateUse1,
          __FILE__,
          __LINE__);
    }
    library->impl(
        lowered.overload.c_str(),
        torch::CppFunction::makeFromBoxedFunctor(std::make_unique<RecordKernel>(&op_table().back())));
  }
}

} // namespace tpu
