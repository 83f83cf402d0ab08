#include "record/range_checks.h"

#include "launch/program.h"
#include "python_error.h"

#include <algorithm>
#include <limits>
#include <string_view>

namespace py = pybind11;

namespace tpu {
namespace {

constexpr size_t kFewChecks = 64;

// As in tpu_backend/lowering/bounds.py.
constexpr int64_t kInRange = std::numeric_limits<int64_t>::min();

// Waits for a program.  One that XLA had no memory for has failed, and its results never come.
bool has_run(PyObject* token) {
  static PyObject* const block_until_ready = PyUnicode_InternFromString("block_until_ready");
  if (auto done = py::reinterpret_steal<py::object>(PyObject_CallMethodNoArgs(token, block_until_ready))) {
    return true;
  }
  if (PyErr_ExceptionMatches(PyExc_Exception) == 0) { // Ctrl-C
    throw_python_error();
  }
  PyErr_Clear();
  return false;
}

// Of the program that looked, which is done.  Knows it only where the device's memory is the host's; else Python looks.
bool is_known_to_be_in_range(PyObject* out_of_range) {
  Py_buffer memory;
  if (PyObject_GetBuffer(out_of_range, &memory, PyBUF_SIMPLE) != 0) {
    PyErr_Clear();
    return false;
  }
  const auto* first = static_cast<const int64_t*>(memory.buf);
  const auto count = memory.len / static_cast<Py_ssize_t>(sizeof(int64_t));
  const bool is_in_range = std::all_of(first, first + count, [](int64_t index) { return index == kInRange; });
  PyBuffer_Release(&memory);
  return is_in_range;
}

bool is_users(PyCodeObject* code) {
  const char* file = PyUnicode_AsUTF8(code->co_filename);
  if (file == nullptr) {
    PyErr_Clear();
    return true;
  }
  for (const auto& prefix : runtime().not_the_users) {
    if (std::string_view(file).starts_with(prefix)) {
      return false;
    }
  }
  return true;
}

} // namespace

UserPlace user_place() {
  py::gil_scoped_acquire gil;
  auto frame = py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(PyEval_GetFrame()));
  while (frame) {
    auto* raw = reinterpret_cast<PyFrameObject*>(frame.ptr());
    auto code = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(PyFrame_GetCode(raw)));
    if (is_users(reinterpret_cast<PyCodeObject*>(code.ptr()))) {
      return {shared_reference(code.release().ptr()), PyFrame_GetLasti(raw)};
    }
    frame = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(PyFrame_GetBack(raw)));
  }
  return {};
}

void RangeChecks::raise_old() {
  while (checks_.size() > kFewChecks &&
         py::handle(checks_.front().out_of_range.get()).attr("is_ready")().cast<bool>()) {
    raise_front();
  }
}

void RangeChecks::raise_failed(size_t num_launched) {
  while (!checks_.empty() && checks_.front().launch <= num_launched) {
    raise_front();
  }
}

// The front is taken out first: another thread may come while Python waits, and what is raised is raised once.
void RangeChecks::raise_front() {
  const RangeCheck check = std::move(checks_.front());
  checks_.pop_front();
  if (!has_run(check.token.get())) {
    return; // whoever reads its results, or waits for it, hears why
  }
  if (is_known_to_be_in_range(check.out_of_range.get())) {
    return;
  }
  py::list places;
  for (const auto& entry : check.entries) {
    py::object code = entry.place.code ? py::reinterpret_borrow<py::object>(entry.place.code.get()) : py::none();
    places.append(py::make_tuple(entry.entry, entry.signature, code, entry.place.lasti));
  }
  auto done = py::reinterpret_steal<py::object>(PyObject_CallFunction(
      runtime().raise_range_error, "OOO", check.out_of_range.get(), check.bounds_checks.get(), places.ptr()));
  if (!done) {
    throw_python_error();
  }
}

} // namespace tpu
