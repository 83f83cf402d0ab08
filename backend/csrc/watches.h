// The Python state that a captured step depends on and a replay does not see, looked at before each replay.
#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace tpu {

// The same object; of numbers, strings and tuples also an equal one.
bool is_same(PyObject* before, PyObject* now);

// All of it wants the GIL.
class Watches {
 public:
  // `entries`: (dictionary, key, value) that must stay: a tensor the same object, on the same storage, with or without
  // a gradient as now; another value equal.  (container, None, length): how many items it has. `numbers`: (dictionary,
  // key) of numbers that may change.
  Watches(const pybind11::list& entries, const pybind11::list& numbers);

  // The place of the first entry that is no longer as it was; -1: there is none.
  int first_changed() const;
  // What the numbers are now, in order; false where one is no longer a number.
  bool read_numbers(std::vector<double>& values) const;
  // The tensors on these storages, which are given by their addresses, ascending.
  std::vector<at::Tensor> tensors_on(const std::vector<uintptr_t>& addresses) const;

 private:
  using Reference = std::shared_ptr<PyObject>;
  struct Entry {
    Reference container;
    Reference key; // null: the length is watched
    Reference value;
    Py_ssize_t length{0};
    bool is_tensor{false};
    uintptr_t address{0}; // of a tensor of the device
    bool requires_grad{false};
    bool has_grad{false};
  };
  static bool is_unchanged(const Entry& entry);

  std::vector<Entry> entries_;
  std::vector<std::pair<Reference, Reference>> numbers_;
};

} // namespace tpu
