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

bool has_gradient(const at::Tensor& tensor) {
  return tensor.is_leaf() && tensor.grad().defined();
}

// So many items further on is looked at once memory has brought what was asked for.
constexpr size_t kAhead = 8;

void fetch(const void* address) {
  __builtin_prefetch(address);
}

// Borrowed; null where there is none.
PyObject* item(PyObject* dictionary, PyObject* key) {
  if (PyCell_Check(dictionary)) {
    return PyCell_GET(dictionary);
  }
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

// What is_unchanged will look at, as far as nothing changed.
void Watches::TensorState::fetch() const {
  const auto* impl = reinterpret_cast<const char*>(tensor.unsafeGetTensorImpl());
  for (size_t line = 0; line < sizeof(at::TensorImpl); line += 64) {
    tpu::fetch(impl + line);
  }
  tpu::fetch(storage);
  tpu::fetch(buffer);
  tpu::fetch(autograd);
}

bool Watches::TensorState::is_unchanged() const {
  return address_of(tensor) == address && tensor.requires_grad() == requires_grad && has_gradient(tensor) == has_grad;
}

Watches::Watches(const py::list& entries, const py::list& numbers) {
  const auto pointer_to = [&](const py::object& object) {
    kept_.push_back(kept(object));
    return object.ptr();
  };
  int place = 0;
  for (const auto& handle : entries) {
    const auto watched = py::cast<py::tuple>(handle);
    const py::object container = watched[0], key = watched[1], value = watched[2];
    if (key.is_none()) {
      lengths_.push_back({pointer_to(container), py::cast<Py_ssize_t>(value), place});
    } else {
      items_.push_back({pointer_to(container), pointer_to(key), pointer_to(value), place});
      if (THPVariable_Check(value.ptr())) {
        const at::Tensor& tensor = THPVariable_Unpack(value.ptr());
        const bool is_on_device = address_of(tensor) != 0;
        tensors_.push_back(
            {.tensor = tensor,
             .address = address_of(tensor),
             .requires_grad = tensor.requires_grad(),
             .has_grad = has_gradient(tensor),
             .place = place,
             .storage = is_on_device ? tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl() : nullptr,
             .buffer = is_on_device ? buffer_of(tensor) : nullptr,
             .autograd = tensor.unsafeGetTensorImpl()->autograd_meta()});
      }
    }
    ++place;
  }
  for (const auto& handle : numbers) {
    const auto number = py::cast<py::tuple>(handle);
    numbers_.emplace_back(kept(number[0]), kept(number[1]));
  }
}

int Watches::first_changed() const {
  for (const auto& [container, length, place] : lengths_) {
    const auto now = PyDict_Check(container) ? PyDict_GET_SIZE(container) : PyObject_Length(container);
    if (now != length) {
      return place;
    }
  }
  for (size_t i = 0; i < items_.size(); ++i) {
    if (i + 2 * kAhead < items_.size()) {
      fetch(items_[i + 2 * kAhead].dictionary);
      if (PyObject* soon = items_[i + kAhead].dictionary; PyDict_Check(soon)) {
        fetch(reinterpret_cast<PyDictObject*>(soon)->ma_keys);
      }
    }
    const auto& [dictionary, key, value, place] = items_[i];
    if (!is_same(value, item(dictionary, key))) {
      return place;
    }
  }
  for (size_t i = 0; i < tensors_.size(); ++i) {
    if (i + kAhead < tensors_.size()) {
      tensors_[i + kAhead].fetch();
    }
    if (!tensors_[i].is_unchanged()) {
      return tensors_[i].place;
    }
  }
  return -1;
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
  for (const auto& state : tensors_) {
    if (state.address != 0 && std::binary_search(addresses.begin(), addresses.end(), state.address)) {
      tensors.push_back(state.tensor);
    }
  }
  return tensors;
}

} // namespace tpu
