#include "python_error.h"

#include "launch/program.h"

#include <c10/util/Exception.h>

namespace tpu {

bool is_interrupt(const pybind11::error_already_set& error) {
  return !error.matches(PyExc_Exception);
}

pybind11::object keeping_interrupts(const pybind11::object& callback) {
  // In C++: between the two lines below Python must run no code, in which the signal would be raised again.
  return pybind11::cpp_function([callback](const pybind11::args& args) {
    if (PyObject* result = PyObject_CallObject(callback.ptr(), args.ptr())) {
      Py_DECREF(result);
      return;
    }
    if (PyErr_ExceptionMatches(PyExc_KeyboardInterrupt) == 0) {
      throw pybind11::error_already_set();
    }
    PyErr_Clear();
    PyErr_SetInterrupt();
  });
}

void throw_torch_error(const std::string& message) {
  if (message.find("RESOURCE_EXHAUSTED") != std::string::npos) {
    const auto memory = pybind11::reinterpret_steal<pybind11::object>(PyObject_CallNoArgs(runtime().describe_shortage));
    if (!memory) {
      throw pybind11::error_already_set();
    }
    TORCH_CHECK_WITH(OutOfMemoryError, false, message, "\n", pybind11::str(memory).cast<std::string>());
  }
  TORCH_CHECK(false, message);
}

void throw_python_error() {
  pybind11::error_already_set error;
  if (is_interrupt(error)) {
    throw error;
  }
  const std::string message = pybind11::str(error.value());
  TORCH_CHECK_NOT_IMPLEMENTED(!error.matches(PyExc_NotImplementedError), message);
  TORCH_CHECK_INDEX(!error.matches(PyExc_IndexError), message);
  const auto linalg_error = pybind11::module_::import("torch._C").attr("_LinAlgError");
  TORCH_CHECK_WITH(LinAlgError, !error.matches(linalg_error), message);
  throw_torch_error(message);
}

} // namespace tpu
