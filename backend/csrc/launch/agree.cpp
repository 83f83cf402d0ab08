// In a region ranks launch programs with collectives together: how one is launched is agreed on with the other ranks.
#include "launch/program.h"

#include "python_error.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>

namespace py = pybind11;

namespace tpu {

bool has_collectives(const Segment& segment) {
  return std::any_of(segment.entries.begin(), segment.entries.end(), [](const Signature* entry) {
    return entry->op != nullptr && entry->op->is_collective;
  });
}

bool is_launched(const Segment& segment, const Locals& results, Policy policy) {
  return !results.empty() || !segment.checked.empty() || (policy == Policy::Declared && has_collectives(segment));
}

void ProgramCache::agree(Program& program, const Segment& segment, const Results& results) {
  if (!results.compares && program.agreement && is_known(program, segment, results.locals)) {
    static PyObject* const is_settled = PyUnicode_InternFromString("is_settled");
    const auto settled =
        py::reinterpret_steal<py::object>(check(PyObject_GetAttr(program.agreement.get(), is_settled)));
    if (settled.ptr() == Py_True) {
      return;
    }
  }
  const auto description = describe_new(program, segment, results.locals);
  const auto agreement = [&] {
    PyObject* const call[] = {description.ptr(), results.compares ? Py_True : Py_False};
    const StreamUnlocked unlocked(mutex_);
    return py::reinterpret_steal<py::object>(check(PyObject_Vectorcall(runtime().agree, call, 2, nullptr)));
  }();
  if (program.agreement && agreement.ptr() == program.agreement.get()) {
    return;
  }
  program.offset_is_input = agreement.attr("offset_is_input").cast<std::vector<bool>>();
  program.agreement = shared_reference(Py_NewRef(agreement.ptr()));
  program.plan = program.plan_without_gradients = std::nullopt;
}

void ProgramCache::announce(const Program& program, Specialization& specialization, const Segment& segment) {
  if (!specialization.announce) {
    py::list keys;
    for (const auto& link : specialization.links) {
      keys.append(py::handle(link.executable.get()).attr("key"));
    }
    const auto announcer = py::handle(program.agreement.get()).attr("announcer")(keys, segment.entries.size());
    specialization.announce = shared_reference(Py_NewRef(announcer.ptr()));
  }
  const StreamUnlocked unlocked(mutex_);
  check(PyObject_CallNoArgs(specialization.announce.get())).dec_ref();
}

} // namespace tpu
