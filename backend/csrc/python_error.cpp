#include "python_error.h"

#include <c10/util/Exception.h>

namespace tpu {

bool is_interrupt(const pybind11::error_already_set& error) {
  return !error.matches(PyExc_Exception);
}

void throw_torch_error(const std::string& message) {
  TORCH_CHECK_WITH(OutOfMemoryError, message.find("RESOURCE_EXHAUSTED") == std::string::npos, message);
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
  throw_torch_error(message);
}

} // namespace tpu
