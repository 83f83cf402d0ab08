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
  // Apart and small: a replay comes here with a cold cache, and what is looked at in one short loop is fetched at once.
  struct Length {
    PyObject* container;
    Py_ssize_t length;
    int place; // among the entries
  };
  struct Item {
    PyObject* dictionary; // or a closure's cell
    PyObject* key;
    PyObject* value;
    int place;
  };
  struct TensorState {
    at::Tensor tensor;
    uintptr_t address; // of its buffer; 0 where it is a tensor of another device
    bool requires_grad;
    bool has_grad;
    int place;
    const void* storage; // these are not followed: where memory is asked for
    const void* buffer;
    const void* autograd;
    void fetch() const;
    bool is_unchanged() const;
  };

  std::vector<Length> lengths_;
  std::vector<Item> items_;
  std::vector<TensorState> tensors_;
  std::vector<std::pair<Reference, Reference>> numbers_;
  std::vector<Reference> kept_; // what those above point to
};

} // namespace tpu
