// Signatures in Python's terms, for the lowering.  Runs on a cache miss only.
#include "program.h"

#include <pybind11/complex.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <bit>

namespace py = pybind11;

namespace tpu {
namespace {

// Walks a signature's words; each argument becomes a tuple whose first element says what it is.
class Decoder {
 public:
  explicit Decoder(const Signature& signature) : words_(signature.words) {}

  py::tuple next(bool reads) {
    const uint64_t word = words_[at_++];
    const uint64_t payload = payload_of(word);
    switch (tag_of(word)) {
      case Tag::None:
        return py::make_tuple("none");
      case Tag::TensorWhole: {
        const Layout* layout = layout_by_id(static_cast<uint32_t>(payload));
        return py::make_tuple(
            "tensor", reads, layout->dims, static_cast<int>(layout->dtype), py::none(), py::none(),
            static_cast<int>(layout->dtype), "whole");
      }
      case Tag::TensorView: {
        const auto ndim = payload & 0xff;
        const auto kind = static_cast<ViewKind>(payload >> 8 & 0xff);
        const auto dtype = static_cast<int>(payload >> 16 & 0xff);
        const Layout* layout = layout_by_id(static_cast<uint32_t>(payload >> 24));
        const auto sizes = integers(ndim);
        const auto strides = integers(ndim);
        const char* names[] = {"", "dense", "box", "general"};
        return py::make_tuple(
            "tensor", reads, layout->dims, static_cast<int>(layout->dtype), sizes, strides, dtype,
            names[static_cast<int>(kind)]);
      }
      case Tag::List: {
        py::list items;
        for (uint64_t i = 0; i < payload; ++i) {
          items.append(next(reads));
        }
        return py::make_tuple("list", items);
      }
      case Tag::Runtime:
        return py::make_tuple(
            "runtime", static_cast<bool>(payload & 0xff), static_cast<int>(payload >> 8 & 0xff),
            static_cast<bool>(payload >> 16 & 1));
      case Tag::Int:
        return py::make_tuple("constant", static_cast<int64_t>(words_[at_++]));
      case Tag::Double:
        return py::make_tuple("constant", std::bit_cast<double>(words_[at_++]));
      case Tag::Complex: {
        const double real = std::bit_cast<double>(words_[at_++]);
        const double imag = std::bit_cast<double>(words_[at_++]);
        return py::make_tuple("constant", std::complex<double>(real, imag));
      }
      case Tag::Bool:
        return py::make_tuple("constant", payload != 0);
      case Tag::IntList:
        return py::make_tuple("constant", integers(payload));
      case Tag::DoubleList: {
        py::list items;
        for (uint64_t i = 0; i < payload; ++i) {
          items.append(std::bit_cast<double>(words_[at_++]));
        }
        return py::make_tuple("constant", items);
      }
      case Tag::BoolList: {
        py::list items;
        for (uint64_t i = 0; i < payload; ++i) {
          items.append(words_[at_++] != 0);
        }
        return py::make_tuple("constant", items);
      }
      case Tag::String:
        return py::make_tuple("constant", interned_string(payload));
      case Tag::Repeated:
        return py::make_tuple("repeated", payload, next(reads));
      case Tag::Random:
        return py::make_tuple("random");
    }
    throw std::logic_error("unknown tag in a signature");
  }

  bool done() const {
    return at_ == words_.size();
  }

 private:
  std::vector<int64_t> integers(uint64_t count) {
    std::vector<int64_t> result(words_.begin() + static_cast<int64_t>(at_), words_.begin() + static_cast<int64_t>(at_ + count));
    at_ += count;
    return result;
  }

  const std::vector<uint64_t>& words_;
  size_t at_{1};
};

} // namespace

PyObject* describe_signature(uint32_t id) {
  const Signature& signature = signature_by_id(id);
  py::dict result;
  py::list arguments;
  if (signature.op == nullptr) {
    result["default_dtype"] = py::none();
    result["name"] = signature.words[0] == kBuiltinZeros ? "zeros" : "resize";
    result["overload"] = result["name"];
    if (signature.words[0] == kBuiltinResize) {
      const Layout* from = layout_by_id(static_cast<uint32_t>(signature.words[1]));
      arguments.append(py::make_tuple(
          "tensor", true, from->dims, static_cast<int>(from->dtype), py::none(), py::none(),
          static_cast<int>(from->dtype), "whole"));
    }
  } else {
    result["default_dtype"] = static_cast<int>(default_dtype_of(signature.words[0]));
    const auto& op_name = signature.op->handle.operator_name();
    result["name"] = signature.op->table_name;
    result["overload"] = op_name.overload_name.empty() ? op_name.name : op_name.name + "." + op_name.overload_name;
    const auto& schema_arguments = signature.op->handle.schema().arguments();
    Decoder decoder(signature);
    for (size_t i = 0; i < schema_arguments.size(); ++i) {
      const auto& argument = schema_arguments[i];
      arguments.append(py::make_tuple(
          argument.name(), argument.kwarg_only(), argument.is_out(), argument.real_type()->str(),
          decoder.next(signature.op->args[i].is_read)));
    }
  }
  result["arguments"] = arguments;
  py::list outputs;
  for (const auto& output : signature.outputs) {
    py::dict item;
    item["written_arg"] = output.written_arg;
    item["partial"] = output.partial;
    item["element"] = output.element;
    item["undefined"] = output.undefined;
    item["skip"] = output.skip;
    if (output.undefined) {
      outputs.append(item);
      continue;
    }
    item["sizes"] = output.sizes;
    item["strides"] = output.strides;
    item["dtype"] = static_cast<int>(output.dtype);
    item["layout_dims"] = output.layout->dims;
    item["layout_dtype"] = static_cast<int>(output.layout->dtype);
    item["computed_sizes"] = output.computed_sizes;
    item["computed_dtype"] = static_cast<int>(output.computed_dtype);
    outputs.append(item);
  }
  result["outputs"] = outputs;
  result["wide"] = signature.wide;
  result["random"] = signature.op != nullptr && signature.op->num_draws > 0;
  return result.release().ptr();
}

} // namespace tpu
