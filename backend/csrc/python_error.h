// Python exceptions on their way through C++.
#pragma once

#include <pybind11/pybind11.h>

namespace tpu {

// A new reference that a call of Python's gave.  Raises error_already_set where it gave none.
inline pybind11::handle check(PyObject* object) {
  if (object == nullptr) {
    throw pybind11::error_already_set();
  }
  return object;
}

// Whether it ends a program and does not report a fault: KeyboardInterrupt, SystemExit.
bool is_interrupt(const pybind11::error_already_set& error);

// `callback` for a caller that drops exceptions, such as the garbage collector: a KeyboardInterrupt in it is raised
// anew as soon as Python's code goes on.
pybind11::object keeping_interrupts(const pybind11::object& callback);

// The same as PyTorch raises for its own devices: torch.OutOfMemoryError where XLA found no memory, with the tensors
// that live, else RuntimeError.  Wants the GIL.
[[noreturn]] void throw_torch_error(const std::string& message);

// Throws the Python exception that is set: an interrupt as it is, all else by its message (IndexError,
// NotImplementedError and torch.linalg.LinAlgError keep their type).  Wants the GIL.
[[noreturn]] void throw_python_error();

} // namespace tpu
