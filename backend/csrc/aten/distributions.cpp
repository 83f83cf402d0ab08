#include "aten/distributions.h"

#include <map>

namespace tpu {
namespace {

using Arguments = c10::ArrayRef<c10::IValue>;

double number(const c10::IValue& value) {
  return value.isTensor() ? value.toTensor().item<double>() : value.toScalar().toDouble();
}

void check_uniform(Arguments args) {
  const double from = number(args[1]), to = number(args[2]);
  TORCH_CHECK(from <= to, "uniform_ expects to return a [from, to) range, but found from=", from, " > to=", to);
}

void check_normal(Arguments args) { // (self, mean, std), or (means, std)
  const auto& std = args.size() > 2 && args[1].isDouble() ? args[2] : args[1];
  if (std.isDouble()) {
    TORCH_CHECK(std.toDouble() >= 0, "normal expects std >= 0.0, but found std ", std.toDouble());
  }
}

void check_bernoulli(Arguments args) {
  if (args.size() > 1 && args[1].isDouble()) {
    const double p = number(args[1]);
    TORCH_CHECK(0 <= p && p <= 1, "bernoulli_ expects p to be in [0, 1], but got p=", p);
  }
}

void check_range(int64_t from, int64_t to) {
  TORCH_CHECK(from < to, "random_ expects 'from' to be less than 'to', but got from=", from, " >= to=", to);
}

void check_random_to(Arguments args) {
  check_range(0, args[1].toInt());
}

void check_random_from(Arguments args) {
  if (!args[2].isNone()) { // else up to the largest value of the dtype
    check_range(args[1].toInt(), args[2].toInt());
  }
}

void check_exponential(Arguments args) {
  TORCH_CHECK(number(args[1]) > 0, "exponential_ expects lambda > 0.0, but found lambda=", number(args[1]));
}

void check_geometric(Arguments args) {
  const double p = number(args[1]);
  TORCH_CHECK(0 < p && p < 1, "geometric_ expects p to be in (0, 1), but got p=", p);
}

void check_log_normal(Arguments args) {
  TORCH_CHECK(number(args[2]) > 0, "log_normal_ expects std > 0.0, but found std=", number(args[2]));
}

void check_cauchy(Arguments args) {
  TORCH_CHECK(number(args[2]) > 0, "cauchy_ expects sigma > 0.0, but found sigma=", number(args[2]));
}

} // namespace

ArgumentCheck distribution_check(const c10::OperatorName& op) {
  static const std::map<std::string, ArgumentCheck> checks{
      {"aten::uniform", &check_uniform},
      {"aten::normal", &check_normal},
      {"aten::bernoulli", &check_bernoulli},
      {"aten::random.to", &check_random_to},
      {"aten::random.from", &check_random_from},
      {"aten::exponential", &check_exponential},
      {"aten::geometric", &check_geometric},
      {"aten::log_normal", &check_log_normal},
      {"aten::cauchy", &check_cauchy},
  };
  std::string name = op.name.substr(0, op.name.find_last_not_of('_') + 1); // in place or not
  if (name == "aten::random") {
    name += "." + op.overload_name.substr(0, op.overload_name.find("_out"));
  }
  const auto found = checks.find(name);
  return found == checks.end() ? nullptr : found->second;
}

} // namespace tpu
