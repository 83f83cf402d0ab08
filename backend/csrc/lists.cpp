#include "lists.h"

#include <algorithm>
#include <array>
#include <string_view>

namespace tpu {
namespace {

constexpr std::array<std::string_view, 3> kOnLists{"aten::_foreach_", "aten::_fused_adam", "aten::_fused_sgd"};

size_t num_words(const std::vector<uint64_t>& words, size_t at) {
  const uint64_t payload = payload_of(words[at]);
  switch (tag_of(words[at])) {
    case Tag::TensorView:
      return 1 + 2 * (payload & 0xff);
    case Tag::Int:
    case Tag::Double:
      return 2;
    case Tag::Complex:
      return 3;
    case Tag::IntList:
    case Tag::DoubleList:
    case Tag::BoolList:
      return 1 + payload;
    case Tag::Repeated:
      return 1 + num_words(words, at + 1);
    default:
      return 1;
  }
}

Leaf leaf_at(const Signature& signature, size_t at, size_t arg, int32_t element) {
  const auto& words = signature.words;
  Leaf leaf{.begin = at, .end = at + num_words(words, at), .arg = arg, .element = element};
  const bool is_repeated = tag_of(words[at]) == Tag::Repeated;
  const uint64_t word = words[is_repeated ? at + 1 : at];
  switch (tag_of(word)) {
    case Tag::TensorView: {
      const auto kind = static_cast<ViewKind>(payload_of(word) >> 8 & 0xff);
      leaf.is_tensor = true;
      leaf.has_offset = kind != ViewKind::Dense;
      leaf.has_dims = (payload_of(word) & 0xff) != 0;
      leaf.reads = signature.op->args[arg].is_read;
      break;
    }
    case Tag::TensorWhole:
      leaf.is_tensor = true;
      leaf.has_dims = !layout_by_id(static_cast<uint32_t>(payload_of(word)))->dims.empty();
      leaf.reads = signature.op->args[arg].is_read;
      break;
    case Tag::Runtime:
      (payload_of(word) & 0xff ? leaf.is_integer : leaf.is_real) = true;
      break;
    default:
      break;
  }
  return leaf;
}

bool is_on_lists(const Signature& signature) {
  if (signature.op == nullptr || signature.op->num_draws > 0 || signature.checked || signature.reads_precision) {
    return false;
  }
  const std::string_view name = signature.op->handle.operator_name().name;
  const auto begins = [&](std::string_view prefix) { return name.substr(0, prefix.size()) == prefix; };
  const auto is_of_element = [](const OutputInfo& output) { return output.element >= 0; };
  return std::any_of(kOnLists.begin(), kOnLists.end(), begins) &&
      std::all_of(signature.outputs.begin(), signature.outputs.end(), is_of_element);
}

} // namespace

ListCall list_call(const Signature& signature) {
  if (!is_on_lists(signature)) {
    return {};
  }
  ListCall call;
  size_t at = 1;
  for (size_t arg = 0; arg < signature.op->args.size(); ++arg) {
    const uint64_t word = signature.words[at];
    if (tag_of(word) != Tag::List) {
      call.leaves.push_back(leaf_at(signature, at, arg, -1));
      if (call.leaves.back().has_dims) { // a number for each element, perhaps
        return {};
      }
      at = call.leaves.back().end;
      continue;
    }
    const size_t length = payload_of(word);
    if (length != 0 && call.length != 0 && length != call.length) {
      return {};
    }
    call.length = std::max(call.length, length);
    ++at;
    for (size_t i = 0; i < length; ++i) {
      if (tag_of(signature.words[at]) == Tag::List) {
        return {};
      }
      call.leaves.push_back(leaf_at(signature, at, arg, static_cast<int32_t>(i)));
      at = call.leaves.back().end;
    }
  }
  return call;
}

const Signature* part_of_lists(const Signature& signature, const ListCall& call, size_t first, size_t last) {
  std::vector<uint64_t> words{signature.words[0]};
  size_t at = 1;
  for (const auto& leaf : call.leaves) {
    if (leaf.begin != at) { // the list's own word, or that of an empty one in between
      for (; at < leaf.begin; ++at) {
        const size_t length = payload_of(signature.words[at]);
        words.push_back(length == 0 ? signature.words[at] : tagged(Tag::List, last - first));
      }
    }
    at = leaf.end;
    if (leaf.element >= 0 && (static_cast<size_t>(leaf.element) < first || static_cast<size_t>(leaf.element) >= last)) {
      continue;
    }
    const size_t place = words.size();
    words.insert(words.end(), signature.words.begin() + static_cast<int64_t>(leaf.begin), signature.words.begin() + static_cast<int64_t>(leaf.end));
    if (tag_of(words[place]) == Tag::Repeated) {
      words[place] = tagged(Tag::Repeated, last - first);
    }
  }
  for (; at < signature.words.size(); ++at) { // empty lists at the end
    words.push_back(signature.words[at]);
  }
  Signature part;
  part.op = signature.op;
  part.part_of = &signature;
  part.words = std::move(words);
  part.wide = signature.wide;
  uint32_t number = 0, kept = 0;
  for (const auto& leaf : call.leaves) {
    if (leaf.is_integer || leaf.is_real) {
      const bool is_taken =
          leaf.element < 0 || (static_cast<size_t>(leaf.element) >= first && static_cast<size_t>(leaf.element) < last);
      for (const auto& fit : signature.fits) {
        if (is_taken && fit.number == number) {
          part.fits.push_back({kept, fit.dtype});
        }
      }
      kept += is_taken ? 1 : 0;
      ++number;
    }
  }
  for (const auto& output : signature.outputs) {
    const auto element = static_cast<size_t>(output.element);
    if (element >= first && element < last) {
      part.outputs.push_back(output);
      part.outputs.back().element -= static_cast<int>(first);
    }
  }
  return known_or_stored(std::move(part));
}

} // namespace tpu
