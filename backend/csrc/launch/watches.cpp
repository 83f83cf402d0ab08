#include "launch/watches.h"

#include "device/device.h"

#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <unordered_map>
#include <unordered_set>

namespace py = pybind11;

namespace tpu {
namespace {

// 0 where it is a tensor of another device.
uintptr_t address_of(const at::Tensor& tensor) {
  const bool is_ours = tensor.device().type() == kDeviceType && tensor.layout() == at::kStrided;
  return is_ours ? buffer_of(tensor)->address : 0;
}

const c10::StorageImpl* storage_of(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
}

// Undefined where there is none.
const at::TensorImpl* gradient_of(const at::Tensor& tensor) {
  return tensor.is_leaf() ? tensor.grad().unsafeGetTensorImpl() : at::UndefinedTensorImpl::singleton();
}

// So many items further on is looked at once memory has brought what was asked for.
constexpr size_t kAhead = 8;

void fetch(const void* address) {
  __builtin_prefetch(address);
}

// Changes with whatever is set or removed; 0: not known.  (PEP 509; later Pythons no longer say it.)
uint64_t version_of([[maybe_unused]] PyObject* container) {
#if PY_VERSION_HEX < 0x030C0000
  return PyDict_Check(container) ? reinterpret_cast<PyDictObject*>(container)->ma_version_tag : 0;
#else
  return 0;
#endif
}

Py_ssize_t length_of(PyObject* container) {
  return PyDict_Check(container) ? PyDict_GET_SIZE(container) : PyObject_Length(container);
}

// Borrowed; null where there is none.
PyObject* item(PyObject* container, PyObject* key) {
  if (PyCell_Check(container)) {
    return PyCell_GET(container);
  }
  if (PyList_Check(container)) {
    const Py_ssize_t place = PyLong_AsSsize_t(key);
    return place < PyList_GET_SIZE(container) ? PyList_GET_ITEM(container, place) : nullptr;
  }
  PyObject* found = PyDict_GetItemWithError(container, key);
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
  if (now == nullptr || Py_TYPE(before) != Py_TYPE(now)) {
    return false;
  }
  if (PyFloat_Check(now)) { // by its bits: 0.0 and -0.0 are two numbers, and NaN is one
    return std::bit_cast<uint64_t>(PyFloat_AS_DOUBLE(before)) == std::bit_cast<uint64_t>(PyFloat_AS_DOUBLE(now));
  }
  if (PyTuple_Check(now)) { // (2,) is not (2.0,)
    const Py_ssize_t length = PyTuple_GET_SIZE(now);
    bool is_equal = PyTuple_GET_SIZE(before) == length;
    for (Py_ssize_t i = 0; is_equal && i < length; ++i) {
      is_equal = is_same(PyTuple_GET_ITEM(before, i), PyTuple_GET_ITEM(now, i));
    }
    return is_equal;
  }
  if (!PyLong_Check(now) && !PyUnicode_Check(now)) {
    return false;
  }
  const int equal = PyObject_RichCompareBool(before, now, Py_EQ);
  if (equal < 0) {
    PyErr_Clear();
  }
  return equal == 1;
}

Watches::TensorState::TensorState(at::Tensor watched, bool keeps, int at)
    : tensor(std::move(watched)), kept_place(tensor.unsafeGetTensorImpl()->unsafe_storage().getWeakStorageImpl()),
      storage(storage_of(tensor)), autograd(tensor.unsafeGetTensorImpl()->autograd_meta()), address(address_of(tensor)),
      is_strided(tensor.layout() == at::kStrided && !tensor.is_nested()), dtype(tensor.scalar_type()),
      is_conj(tensor.is_conj()), is_neg(tensor.is_neg()), requires_grad(tensor.requires_grad()), keeps_gradient(keeps),
      gradient(gradient_of(tensor)), place(at) {
  if (keeps) {
    kept_gradient.emplace(tensor.grad().getIntrusivePtr());
  }
  if (is_strided) {
    sizes = tensor.sizes();
    strides = tensor.strides();
    offset = tensor.storage_offset();
  }
}

// What is_unchanged will look at, as far as nothing changed.
void Watches::TensorState::fetch() const {
  const auto* impl = reinterpret_cast<const char*>(tensor.unsafeGetTensorImpl());
  for (size_t line = 0; line < sizeof(at::TensorImpl); line += 64) {
    tpu::fetch(impl + line);
  }
  tpu::fetch(autograd);
}

bool Watches::TensorState::is_unchanged() const {
  if (storage_of(tensor) != storage || tensor.scalar_type() != dtype || tensor.is_conj() != is_conj ||
      tensor.is_neg() != is_neg) {
    return false;
  }
  if (is_strided && (tensor.sizes() != sizes || tensor.strides() != strides || tensor.storage_offset() != offset)) {
    return false;
  }
  const auto* now = tensor.unsafeGetTensorImpl()->autograd_meta();
  if (now == nullptr && autograd == nullptr) {
    return true;
  }
  const auto* const none = at::UndefinedTensorImpl::singleton();
  const at::TensorImpl* const its_gradient = gradient_of(tensor);
  return tensor.requires_grad() == requires_grad &&
      (keeps_gradient ? its_gradient == gradient : (its_gradient == none) == (gradient == none));
}

Watches::Watches(const py::list& entries, const py::list& numbers) {
  add_containers(entries);
  for (const auto& handle : numbers) {
    const auto number = py::cast<py::tuple>(handle);
    numbers_.emplace_back(kept(number[0]), kept(number[1]));
  }
}

void Watches::add_containers(const py::list& entries) {
  const auto pointer_to = [&](const py::object& object) {
    kept_.push_back(kept(object));
    return object.ptr();
  };
  std::unordered_map<PyObject*, std::vector<std::pair<py::tuple, int>>> by_container;
  std::vector<PyObject*> order;
  std::unordered_set<PyObject*> tensors; // a parameter is its module's and its optimizer's
  int place = 0;
  for (const auto& handle : entries) {
    auto entry = py::cast<py::tuple>(handle);
    PyObject* container = pointer_to(entry[0]);
    auto& its_entries = by_container[container];
    if (its_entries.empty()) {
      order.push_back(container);
    }
    its_entries.emplace_back(std::move(entry), place++);
  }
  for (PyObject* object : order) {
    Container container{object, 0, -1, 0, 0}; // since these items were read, the user's Python ran
    for (const auto& [entry, at] : by_container[object]) {
      const py::object key = entry[1], value = entry[2];
      if (key.is(py::ellipsis())) {
        container.length = py::cast<Py_ssize_t>(value);
        container.length_place = at;
        continue;
      }
      items_.push_back({pointer_to(key), pointer_to(value), at});
      if (THPVariable_Check(value.ptr()) && tensors.insert(value.ptr()).second) {
        tensors_.emplace_back(THPVariable_Unpack(value.ptr()), py::cast<bool>(entry[3]), at);
      }
    }
    container.end = items_.size();
    containers_.push_back(container);
  }
}

int Watches::first_changed_in(const Container& container, size_t begin) const {
  if (container.length >= 0 && length_of(container.object) != container.length) {
    return container.length_place;
  }
  for (size_t i = begin; i < container.end; ++i) {
    if (!is_same(items_[i].value, item(container.object, items_[i].key))) {
      return items_[i].place;
    }
  }
  return -1;
}

int Watches::first_changed() const {
  for (size_t i = 0, begin = 0; i < containers_.size(); begin = containers_[i++].end) {
    if (i + kAhead < containers_.size()) {
      fetch(containers_[i + kAhead].object);
    }
    const Container& container = containers_[i];
    const uint64_t version = version_of(container.object);
    if (version != 0 && version == container.version) {
      continue;
    }
    if (const int place = first_changed_in(container, begin); place >= 0) {
      return place;
    }
    container.version = version;
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
    if (now != nullptr && THPVariable_Check(now)) {
      const at::Tensor& tensor = THPVariable_Unpack(now);
      if (!tensor.is_cpu() || tensor.numel() != 1 || tensor.is_complex()) {
        return false;
      }
      values.push_back(tensor.item().toDouble());
      if (c10::isIntegralType(tensor.scalar_type(), /*includeBool=*/false) && std::abs(values.back()) >= kInexact) {
        return false;
      }
      continue;
    }
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
