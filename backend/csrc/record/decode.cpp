#include "record/decode.h"

#include "launch/program.h"

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
          "tensor",
          reads,
          layout->dims,
          static_cast<int>(layout->dtype),
          py::none(),
          py::none(),
          static_cast<int>(layout->dtype),
          "whole");
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
          "tensor",
          reads,
          layout->dims,
          static_cast<int>(layout->dtype),
          sizes,
          strides,
          dtype,
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
          "runtime",
          static_cast<bool>(payload & 0xff),
          static_cast<int>(payload >> 8 & 0xff),
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

  bool done() const { return at_ == words_.size(); }

 private:
  std::vector<int64_t> integers(uint64_t count) {
    std::vector<int64_t> result(
        words_.begin() + static_cast<int64_t>(at_), words_.begin() + static_cast<int64_t>(at_ + count));
    at_ += count;
    return result;
  }

  const std::vector<uint64_t>& words_;
  size_t at_{1};
};

// All that tells a signature from others, with names and dims in the place of this process's ids.
class Identity {
 public:
  explicit Identity(const Signature& signature) : words_(signature.words), wide_(signature.wide) {
    if (signature.op == nullptr) {
      put(words_[0]);
      if (words_[0] == kBuiltinResize) {
        put(*layout_by_id(static_cast<uint32_t>(words_[1])));
        num_links_ = 1;
      }
    } else {
      put(static_cast<uint64_t>(default_dtype_of(words_[0])));
      for (const auto& arg : signature.op->args) {
        argument(arg.is_read);
      }
      numbers_.integers += signature.op->num_draws > 0 ? 2 : 0; // seed and offset
    }
    for (const auto& output : signature.outputs) {
      put(static_cast<uint64_t>(output.undefined) | static_cast<uint64_t>(output.partial) << 1 |
          static_cast<uint64_t>(output.skip) << 2 | static_cast<uint64_t>(output.dtype) << 8 |
          static_cast<uint64_t>(output.computed_dtype) << 16);
      put(static_cast<uint64_t>(output.written_arg));
      put(static_cast<uint64_t>(output.element));
      put(output.sizes);
      put(output.strides);
      put(output.computed_sizes);
      if (output.layout != nullptr) {
        put(*output.layout);
      }
      num_links_ += output.partial && !output.skip ? 1 : 0;
    }
    put(static_cast<uint64_t>(signature.wide));
  }

  py::bytes bytes() const { return {reinterpret_cast<const char*>(said_.data()), said_.size() * sizeof(uint64_t)}; }

  int num_links() const { return num_links_; }

  // How many of a segment's numbers are for it: floats, doubles, integers, offsets.
  py::tuple numbers() const {
    return py::make_tuple(numbers_.floats, numbers_.doubles, numbers_.integers, numbers_.offsets);
  }

 private:
  void argument(bool reads) {
    const uint64_t word = words_[at_++];
    const uint64_t payload = payload_of(word);
    switch (tag_of(word)) {
    case Tag::TensorWhole:
      put(static_cast<uint64_t>(Tag::TensorWhole));
      put(*layout_by_id(static_cast<uint32_t>(payload)));
      num_links_ += reads ? 1 : 0;
      return;
    case Tag::TensorView:
      numbers_.offsets += static_cast<ViewKind>(payload >> 8 & 0xff) != ViewKind::Dense ? 1 : 0;
      put(word & 0xffffffff);
      put(*layout_by_id(static_cast<uint32_t>(payload >> 24)));
      copy(2 * (payload & 0xff));
      num_links_ += reads ? 1 : 0;
      return;
    case Tag::String: {
      const auto& text = interned_string(payload);
      put(static_cast<uint64_t>(Tag::String));
      put(text.size());
      for (const char letter : text) {
        put(static_cast<unsigned char>(letter));
      }
      return;
    }
    case Tag::List:
      put(word);
      for (uint64_t i = 0; i < payload; ++i) {
        argument(reads);
      }
      return;
    case Tag::Repeated:
      put(word);
      argument(reads);
      return;
    case Tag::Int:
    case Tag::Double:
      put(word);
      copy(1);
      return;
    case Tag::Complex:
      put(word);
      copy(2);
      return;
    case Tag::IntList:
    case Tag::DoubleList:
    case Tag::BoolList:
      put(word);
      copy(payload);
      return;
    case Tag::Runtime:
      ++((payload & 0xff) != 0 ? numbers_.integers : wide_ ? numbers_.doubles : numbers_.floats);
      put(word);
      return;
    case Tag::None:
    case Tag::Bool:
    case Tag::Random:
      put(word);
      return;
    }
    throw std::logic_error("unknown tag in a signature");
  }

  void put(uint64_t word) { said_.push_back(word); }

  void put(const std::vector<int64_t>& numbers) {
    put(numbers.size());
    said_.insert(said_.end(), numbers.begin(), numbers.end());
  }

  void put(const Layout& layout) {
    put(static_cast<uint64_t>(layout.dtype));
    put(layout.dims);
  }

  void copy(uint64_t count) {
    const auto first = words_.begin() + static_cast<int64_t>(at_);
    said_.insert(said_.end(), first, first + static_cast<int64_t>(count));
    at_ += count;
  }

  const std::vector<uint64_t>& words_;
  const bool wide_;
  size_t at_{1};
  std::vector<uint64_t> said_;
  int num_links_{0};
  struct {
    int floats{0}, doubles{0}, integers{0}, offsets{0};
  } numbers_;
};

// The overload, and the name by which the table of lowerings has it.
std::pair<std::string, std::string> names_of(const Signature& signature) {
  if (signature.op == nullptr) {
    const std::string name = signature.words[0] == kBuiltinZeros ? "zeros" : "resize";
    return {name, name};
  }
  const auto& name = signature.op->handle.operator_name();
  return {name.overload_name.empty() ? name.name : name.name + "." + name.overload_name, signature.op->table_name};
}

} // namespace

PyObject* summarize_signature(uint32_t id) {
  const Signature& signature = signature_by_id(id);
  const Identity identity(signature);
  const auto [overload, name] = names_of(signature);
  py::list values, layouts;
  for (const auto& output : signature.outputs) {
    if (!output.undefined) {
      values.append(py::make_tuple(static_cast<int>(output.dtype), output.layout->numel));
    }
    if (!output.skip) {
      layouts.append(py::make_tuple(static_cast<int>(output.layout->dtype), py::tuple(py::cast(output.layout->dims))));
    }
  }
  const auto outline = py::make_tuple(signature.words[0], signature.words.size());
  return py::make_tuple(
             overload, name, identity.bytes(), outline, identity.num_links(), identity.numbers(), layouts, values)
      .release()
      .ptr();
}

PyObject* describe_signature(uint32_t id) {
  const Signature& signature = signature_by_id(id);
  py::dict result;
  py::list arguments;
  if (signature.op == nullptr) {
    result["default_dtype"] = py::none();
    if (signature.words[0] == kBuiltinResize) {
      const Layout* from = layout_by_id(static_cast<uint32_t>(signature.words[1]));
      arguments.append(
          py::make_tuple(
              "tensor",
              true,
              from->dims,
              static_cast<int>(from->dtype),
              py::none(),
              py::none(),
              static_cast<int>(from->dtype),
              "whole"));
    }
  } else {
    result["default_dtype"] = static_cast<int>(default_dtype_of(signature.words[0]));
    const auto& schema_arguments = signature.op->handle.schema().arguments();
    Decoder decoder(signature);
    for (size_t i = 0; i < schema_arguments.size(); ++i) {
      const auto& argument = schema_arguments[i];
      arguments.append(
          py::make_tuple(
              argument.name(),
              argument.kwarg_only(),
              argument.is_out(),
              argument.real_type()->str(),
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
