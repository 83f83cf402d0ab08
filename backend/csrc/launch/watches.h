// The Python state that a captured step depends on and a replay does not see, looked at before each replay.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/DimVector.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace tpu {

inline constexpr double kInexact = 9007199254740992.0; // 2^53: from here on not every integer is a double

// The same object; of numbers, strings and tuples also an equal one.
bool is_same(PyObject* before, PyObject* now);

// All of it wants the GIL.
class Watches {
 public:
  // `entries`: (container, key, value, whether the step keeps its gradient) that must stay, of a dictionary, a list or
  // a closure's cell: a tensor the same object, on the same storage, of the same dtype, shape and strides, with the
  // same tensor for its gradient if that is kept, else with or without one as now; another value equal. (container,
  // ..., length, false): how many items it has.  `numbers`: (dictionary, key) of numbers, and of tensors of one element
  // on the CPU, that may change.
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
  struct Container { // a dictionary, a list, a closure's cell, or what has a length
    PyObject* object;
    mutable uint64_t version; // when all was as it should be; 0: never, or unknown
    Py_ssize_t length;        // -1: it may change
    int length_place;         // among the entries
    size_t end;               // of its items, which begin where those of the container before end
  };
  struct Item {
    PyObject* key;
    PyObject* value;
    int place; // among the entries
  };
  // Its buffer is not looked at: while the storage is the same one, the step finds out itself that a buffer is gone.
  struct TensorState {
    at::Tensor tensor;
    c10::weak_intrusive_ptr<c10::StorageImpl> kept_place; // no other storage can come to stand where this one does
    const c10::StorageImpl* storage;
    const c10::AutogradMetaInterface* autograd; // where memory is asked for
    uintptr_t address;                          // of its buffer; 0 where it is a tensor of another device
    bool is_strided;                            // of others not the geometry
    c10::DimVector sizes;
    c10::DimVector strides;
    int64_t offset{0};
    c10::ScalarType dtype;
    bool is_conj;
    bool is_neg;
    bool requires_grad;
    bool keeps_gradient; // the step adds to the one that is there
    std::optional<c10::weak_intrusive_ptr<at::TensorImpl, at::UndefinedTensorImpl>> kept_gradient{}; // as kept_place
    const at::TensorImpl* gradient;
    int place;

    TensorState(at::Tensor watched, bool keeps, int at);
    void fetch() const;
    bool is_unchanged() const;
  };

  void add_containers(const pybind11::list& entries);
  int first_changed_in(const Container& container, size_t begin) const;

  std::vector<Container> containers_;
  std::vector<Item> items_;
  std::vector<TensorState> tensors_;
  std::vector<std::pair<Reference, Reference>> numbers_;
  std::vector<Reference> kept_; // what those above point to
};

} // namespace tpu
