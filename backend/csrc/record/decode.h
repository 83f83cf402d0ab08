// Signatures in Python's terms.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>

namespace tpu {

// All of it, for the lowering; see tpu_backend/runtime/signature.py for the form.
PyObject* describe_signature(uint32_t id);

// What is asked of it before anything is compiled, in a tenth of the time: a `Summary` of
// tpu_backend/runtime/signature.py, with all that tells it from others as bytes, the same in every process, in the
// place of id and digest.
PyObject* summarize_signature(uint32_t id);

} // namespace tpu
