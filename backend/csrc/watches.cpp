#include "watches.h"

#include "device.h"

#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>

namespace py = pybind11;

namespace tpu {
namespace {

// 0 where it is a tensor of another device.
uintptr_t address_of(const at::Tensor& tensor) {
  const bool is_ours = tensor.device().type() == kDeviceType && tensor.layout() == at::kStrided;
  return is_ours ? buffer_of(tensor)->address : 0;
}

// Borrowed; null where there is none.
PyObject* item(PyObject* dictionary, PyObject* key) {
  PyObject* found = PyDict_GetItemWithError(dictionary, key);
  if (found == nullptr && PyErr_Occurred() != nullptr) {
    throw py::error_already_set();
  }
  return found;
}

std::shared_ptr<PyObject> kept(const py::object& object) {
  return shared_reference(Py_NewRef(object.ptr()));
}

} // namespace

bool is_same(PyObject* before, PyObject* now) {
  if (before == now) {
    return true;
  }
  if (now == nullptr || Py_TYPE(before) != Py_TYPE(now) ||
      !(PyFloat_Check(now) || PyLong_Check(now) || PyUnicode_Check(now) || PyTuple_Check(now))) {
    return false;
  }
  const int equal = PyObject_RichCompareBool(before, now, Py_EQ);
  if (equal < 0) { // a tuple of tensors
    PyErr_Clear();
  }
  return equal == 1;
}

Watches::Watches(const py::list& entries, const py::list& numbers) {
  for (const auto& handle : entries) {
    const auto watched = py::cast<py::tuple>(handle);
    Entry entry{.container = kept(watched[0]), .key = {}, .value = {}};
    if (watched[1].is_none()) {
      entry.length = py::cast<Py_ssize_t>(watched[2]);
    } else {
      entry.key = kept(watched[1]);
      entry.value = kept(watched[2]);
      entry.is_tensor = THPVariable_Check(entry.value.get());
    }
    if (entry.is_tensor) {
      const at::Tensor& tensor = THPVariable_Unpack(entry.value.get());
      entry.address = address_of(tensor);
      entry.requires_grad = tensor.requires_grad();
      entry.has_grad = tensor.is_leaf() && tensor.grad().defined();
    }
    entries_.push_back(std::move(entry));
  }
  for (const auto& handle : numbers) {
    const auto number = py::cast<py::tuple>(handle);
    numbers_.emplace_back(kept(number[0]), kept(number[1]));
  }
}

bool Watches::is_unchanged(const Entry& entry) {
  if (!entry.key) {
    return PyObject_Length(entry.container.get()) == entry.length;
  }
  PyObject* now = item(entry.container.get(), entry.key.get());
  if (!entry.is_tensor || now != entry.value.get()) {
    return is_same(entry.value.get(), now);
  }
  const at::Tensor& tensor = THPVariable_Unpack(now);
  return address_of(tensor) == entry.address && tensor.requires_grad() == entry.requires_grad &&
      (tensor.is_leaf() && tensor.grad().defined()) == entry.has_grad;
}

int Watches::first_changed() const {
  const auto changed = std::find_if_not(entries_.begin(), entries_.end(), &Watches::is_unchanged);
  return changed == entries_.end() ? -1 : static_cast<int>(changed - entries_.begin());
}

bool Watches::read_numbers(std::vector<double>& values) const {
  for (const auto& [dictionary, key] : numbers_) {
    PyObject* now = item(dictionary.get(), key.get());
    if (now == nullptr || PyBool_Check(now) || (!PyFloat_Check(now) && !PyLong_Check(now))) {
      return false;
    }
    values.push_back(PyFloat_AsDouble(now));
    if (values.back() == -1.0 && PyErr_Occurred() != nullptr) { // an integer beyond all floats
      PyErr_Clear();
      return false;
    }
  }
  return true;
}

std::vector<at::Tensor> Watches::tensors_on(const std::vector<uintptr_t>& addresses) const {
  std::vector<at::Tensor> tensors;
  for (const auto& entry : entries_) {
    if (entry.address != 0 && std::binary_search(addresses.begin(), addresses.end(), entry.address)) {
      tensors.push_back(THPVariable_Unpack(entry.value.get()));
    }
  }
  return tensors;
}

} // namespace tpu
