// The Python module tpu_backend._C: what the Python half sees of the C++ half.
#include "device.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

namespace py = pybind11;

namespace {

// Keeps a Python callable for the life of the process.
PyObject* keep(const py::object& callable) {
  return py::object(callable).release().ptr();
}

void initialize(
    const py::list& lowered_ops,
    const py::object& is_lowered,
    const py::object& compile,
    const py::object& put_numbers,
    const py::object& put,
    const py::object& get,
    const py::object& wait,
    const py::object& after_debug_op) {
  auto& runtime = tpu::runtime();
  runtime.is_lowered = keep(is_lowered);
  runtime.compile = keep(compile);
  runtime.put_numbers = keep(put_numbers);
  runtime.put = keep(put);
  runtime.get = keep(get);
  runtime.wait = keep(wait);
  runtime.after_debug_op = keep(after_debug_op);
  std::vector<tpu::LoweredOp> ops;
  for (const auto& item : lowered_ops) {
    const auto op = py::cast<py::tuple>(item);
    ops.push_back(
        {py::cast<std::string>(op[0]),
         py::cast<std::string>(op[1]),
         py::cast<std::vector<std::string>>(op[2]),
         py::cast<std::vector<std::string>>(op[3]),
         py::cast<std::vector<std::string>>(op[4]),
         py::cast<bool>(op[5])});
  }
  tpu::register_lowered_ops(ops);
  tpu::Device::get().mark_initialized();
}

py::dict compile_stats(c10::DeviceIndex device) {
  auto& stream = tpu::Device::get().stream(device);
  tpu::StreamLock lock(stream.mutex());
  const auto& counters = stream.counters;
  py::dict stats;
  stats["ops_recorded"] = counters.ops_recorded;
  stats["segments_run"] = counters.segments_run;
  stats["compilations"] = counters.compilations;
  stats["memory_hits"] = counters.memory_hits;
  stats["disk_hits"] = counters.disk_hits;
  stats["compile_seconds"] = counters.compile_seconds;
  stats["host_reads"] = counters.host_reads;
  return stats;
}

} // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "The C++ half of the tpu device: buffers, recorder, segments, program cache.";
  m.def("register_device", &tpu::register_hooks);
  m.def("initialize", &initialize);
  m.def("is_initialized", [] { return tpu::Device::get().initialized(); });
  m.def("is_forked", [] { return tpu::forked(); });
  m.def("ensure_initialized", [] { tpu::Device::get().ensure_initialized(); });
  m.def("device_count", [] { return static_cast<int>(tpu::Device::get().count()); });
  m.def("current_device", [] { return static_cast<int>(tpu::Device::get().current()); });
  m.def("set_device", [](int device) { tpu::Device::get().set_current(static_cast<c10::DeviceIndex>(device)); });
  m.def("set_mode", [](int mode) { tpu::set_mode(static_cast<tpu::Mode>(mode)); });
  m.def("get_mode", [] { return static_cast<int>(tpu::mode()); });
  m.def(
      "flush",
      [](int device) {
        auto& stream = tpu::Device::get().stream(static_cast<c10::DeviceIndex>(device));
        tpu::StreamLock lock(stream.mutex());
        stream.cut();
      },
      py::arg("device") = 0,
      py::call_guard<py::gil_scoped_release>());
  m.def("end_step", [](int device) {
    auto& stream = tpu::Device::get().stream(static_cast<c10::DeviceIndex>(device));
    tpu::StreamLock lock(stream.mutex());
    stream.end_step();
  });
  m.def(
      "synchronize",
      [](int device) { tpu::Device::get().synchronize(static_cast<c10::DeviceIndex>(device)); },
      py::call_guard<py::gil_scoped_release>());
  m.def("describe_signature", [](uint32_t id) {
    return py::reinterpret_steal<py::object>(tpu::describe_signature(id));
  });
  m.def("is_box", [](const std::vector<int64_t>& base, const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides, int64_t offset) {
    return tpu::is_box(base, sizes, strides, offset);
  });
  m.def("compile_stats", [](int device) { return compile_stats(static_cast<c10::DeviceIndex>(device)); });
  m.def("fallback_stats", [] { return tpu::Device::get().fallbacks(); });
  m.def("count_fallback", [](const std::string& name) { tpu::Device::get().count_fallback(name); });
  m.def("clear_fallback_stats", [] { tpu::Device::get().clear_fallbacks(); });
  m.def("memory_counters", [](int device) {
    const auto counters = tpu::memory_counters(static_cast<c10::DeviceIndex>(device));
    return py::make_tuple(counters.current, counters.peak, counters.allocations);
  });
  m.def("reset_peak_memory", [](int device) { tpu::reset_peak_memory(static_cast<c10::DeviceIndex>(device)); });
  m.def("default_generator", [](int device) {
    return tpu::Device::get().default_generator(static_cast<c10::DeviceIndex>(device));
  });
  // The jax.Array behind a tensor and the dims it is kept in; None if it was never written.
  m.def("array_of", [](const at::Tensor& tensor) -> py::object {
    TORCH_CHECK(tensor.device().type() == tpu::kDeviceType, "expected a tpu tensor, got one on ", tensor.device());
    auto& stream = tpu::Device::get().stream(tensor.device().index());
    tpu::StreamLock lock(stream.mutex());
    PyObject* array = stream.concrete(tpu::buffer_of(tensor));
    return array == nullptr ? py::none() : py::reinterpret_borrow<py::object>(array);
  });
}
