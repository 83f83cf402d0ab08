// The Python module tpu_backend._C: what the Python half sees of the C++ half.
#include "aten/compiled_graph.h"
#include "distributed/leave.h"
#include "distributed/process_group.h"
#include "distributed/quiet.h"
#include "launch/recorded_step.h"
#include "launch/region.h"
#include "record/rehearsal.h"

#include "device/device.h"
#include "python_error.h"
#include "record/decode.h"
#include "record/settings.h"

#include <c10/util/strides.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <variant>

namespace py = pybind11;

namespace {

std::vector<tpu::LoweredOp> lowered_ops_of(const py::list& items) {
  std::vector<tpu::LoweredOp> ops;
  for (const auto& item : items) {
    const auto op = py::cast<py::tuple>(item);
    ops.push_back(
        {py::cast<std::string>(op[0]),
         py::cast<std::string>(op[1]),
         py::cast<std::vector<std::string>>(op[2]),
         py::cast<std::vector<std::string>>(op[3]),
         py::cast<std::vector<std::string>>(op[4]),
         py::cast<int>(op[5]),
         py::cast<std::map<std::string, std::string>>(op[6])});
  }
  return ops;
}

void initialize(const py::list& lowered_ops, const py::dict& callbacks, const std::vector<std::string>& not_the_users) {
  const auto callback = [&](const char* name) { // for the life of the process
    return py::object(callbacks[name]).release().ptr();
  };
  auto& runtime = tpu::runtime();
  runtime.trace_form = callback("trace_form");
  runtime.agree = callback("agree");
  runtime.plan = callback("plan");
  runtime.compile = callback("compile");
  runtime.prepare = callback("prepare");
  runtime.is_room_short = callback("is_room_short");
  runtime.put_numbers = callback("put_numbers");
  runtime.put = callback("put");
  runtime.copy = callback("copy");
  runtime.get = callback("get");
  runtime.wait = callback("wait");
  runtime.after_debug_op = callback("after_debug_op");
  runtime.describe_shortage = callback("describe_shortage");
  runtime.raise_range_error = callback("raise_range_error");
  runtime.not_the_users = not_the_users;
  tpu::register_lowered_ops(lowered_ops_of(lowered_ops));
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
  stats["segments_in_parts"] = counters.segments_in_parts;
  stats["host_reads"] = counters.host_reads;
  stats["replays"] = counters.replays;
  return stats;
}

// The jax.Array that holds a tensor's buffer, from now on never donated; None if the buffer was never written.
py::object lease_array(const at::Tensor& tensor) {
  auto& stream = tpu::Device::get().stream(tensor.device().index());
  tpu::StreamLock lock(stream.mutex());
  tpu::Buffer* buffer = tpu::buffer_of(tensor);
  const tpu::ValuePtr value = stream.concrete(buffer);
  if (!value) {
    return py::none();
  }
  value->leased = true;
  return py::reinterpret_borrow<py::object>(value->array);
}

py::tuple call_compiled_graph(const tpu::CompiledGraph& graph, const py::args& arguments) {
  HANDLE_TH_ERRORS
  c10::SmallVector<at::Tensor, 16> inputs;
  for (const auto& argument : arguments) {
    inputs.push_back(THPVariable_Unpack(argument.ptr()));
  }
  torch::autograd::variable_list outputs;
  {
    py::gil_scoped_release without_gil;
    outputs = graph(inputs);
  }
  py::tuple returned(outputs.size());
  for (size_t i = 0; i < outputs.size(); ++i) {
    PyTuple_SET_ITEM(returned.ptr(), static_cast<Py_ssize_t>(i), THPVariable_Wrap(std::move(outputs[i])));
  }
  return returned;
  END_HANDLE_TH_ERRORS_PYBIND
}

// A contiguous tensor whose first value is somebody else's jax.Array, which is never donated.
at::Tensor tensor_over(const py::object& array, const std::vector<int64_t>& sizes, int dtype, int device) {
  const auto scalar_type = static_cast<c10::ScalarType>(dtype);
  auto tensor =
      tpu::make_tensor(sizes, c10::contiguous_strides(sizes), scalar_type, static_cast<c10::DeviceIndex>(device));
  auto& stream = tpu::Device::get().stream(tensor.device().index());
  tpu::StreamLock lock(stream.mutex());
  tpu::Buffer* buffer = tpu::buffer_of(tensor);
  stream.overwrite(buffer, tpu::intern_layout(sizes, scalar_type), py::object(array).release().ptr());
  buffer->value->leased = true;
  return tensor;
}

py::object described(const std::optional<tpu::Problem>& problem) {
  if (!problem.has_value()) {
    return py::none();
  }
  const auto& [code, lasti] = problem->place;
  return py::make_tuple(
      problem->text,
      problem->advice,
      problem->signature,
      code ? py::reinterpret_borrow<py::object>(code.get()) : py::none(),
      lasti);
}

// Of each number of a recorded step its kind (0 float, 1 double, 2 integer), its place among these, its value (None
// where it is part of a draw), and the signature of the entry that takes it (-1: it is the start of a slice).
py::list numbers_of(const tpu::RecordedStep& step) {
  py::list all;
  const auto add = [&](int kind, const auto& values, const std::vector<uint32_t>& takers) {
    for (size_t place = 0; place < values.size(); ++place) {
      const int64_t taker = place < takers.size() ? int64_t{takers[place]} : -1;
      all.append(py::make_tuple(kind, place, py::cast(values[place]), taker));
    }
  };
  const auto& numbers = step.run().numbers;
  add(0, numbers.floats, step.record().float_takers);
  add(1, numbers.doubles, step.record().double_takers);
  const auto first_integer = all.size();
  add(2, numbers.integers, step.record().integer_takers);
  for (const auto& draw : step.run().draws) {
    for (size_t place : {draw.place, draw.place + 1}) {
      all[first_integer + place] = py::make_tuple(2, place, py::none(), -1);
    }
  }
  return all;
}

using Bound = std::tuple<int, size_t, std::vector<std::pair<size_t, bool>>>; // kind, place, sources

void make_replayable(
    tpu::RecordedStep& step,
    const py::list& entries,
    const py::list& numbers,
    std::vector<double> values,
    const std::vector<bool>& may_change,
    const std::vector<Bound>& bound) {
  std::vector<tpu::Binding> bindings;
  for (const auto& [kind, place, sources] : bound) {
    bindings.push_back({static_cast<tpu::Binding::Kind>(kind), place, sources});
  }
  step.make_replayable(
      tpu::Watches(entries, numbers), std::move(values), {may_change.begin(), may_change.end()}, std::move(bindings));
}

} // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "The C++ half of the tpu device: buffers, recorder, segments, program cache.";
  m.def("register_device", &tpu::register_hooks);
  m.def("initialize", &initialize);
  m.def("is_initialized", [] { return tpu::Device::get().initialized(); });
  m.def("is_forked", [] { return tpu::forked(); });
  m.def("leave", &tpu::leave);
  m.def("leave_threads", &tpu::leave_threads);
  m.def("fail_at_exit", &tpu::fail_at_exit);
  m.def("silence_gloo", &tpu::silence_gloo);
  m.def("keeping_interrupts", &tpu::keeping_interrupts);
  m.def("ensure_initialized", [] { tpu::Device::get().ensure_initialized(); });
  m.def("device_count", [] { return static_cast<int>(tpu::Device::get().count()); });
  m.def("current_device", [] { return static_cast<int>(tpu::Device::get().current()); });
  m.def("find_device", [](int index) { return static_cast<int>(tpu::Device::get().find(index)); });
  m.def("mark_as_one_of_many", [] { tpu::Device::get().mark_as_one_of_many(); });
  m.def("set_device", [](int device) { tpu::Device::get().set_current(static_cast<c10::DeviceIndex>(device)); });
  m.attr("WITHOUT_GRADIENTS") = tpu::kWithoutGradients;
  m.def("parts", [] { return static_cast<int>(tpu::parts()); });
  m.def("set_parts", [](int parts) { tpu::set_parts(static_cast<tpu::Parts>(parts)); });
  m.def("mark_compile_thread", &tpu::mark_compile_thread);
  m.def("pads_sizes", &tpu::pads_sizes);
  m.def("set_pads_sizes", &tpu::set_pads_sizes);
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
  const auto with_stream = [](int device, const auto& act) {
    auto& stream = tpu::Device::get().stream(static_cast<c10::DeviceIndex>(device));
    tpu::StreamLock lock(stream.mutex());
    act(stream);
  };
  m.def("end_step", [with_stream](int device) { with_stream(device, [](tpu::Stream& stream) { stream.end_step(); }); });
  m.def("matmul_precision", [] { return static_cast<int>(tpu::matmul_precision()); });
  m.def("guards", [] { return tpu::Guards::now().key(); });
  m.def("begin_rehearsal", [with_stream](int device) {
    with_stream(device, [](tpu::Stream& stream) { tpu::Rehearsal::begin(stream); });
  });
  m.def("end_rehearsal", [with_stream](int device) {
    with_stream(device, [](tpu::Stream& stream) { tpu::Rehearsal::end(stream); });
  });
  m.def("begin_region", [with_stream](int device) {
    bool has_begun = false;
    with_stream(device, [&](tpu::Stream& stream) { has_begun = tpu::Region::begin(stream); });
    return has_begun;
  });
  // Returns the executables of its launches.
  m.def("end_region", [with_stream](int device, const std::optional<std::vector<at::Tensor>>& results, bool and_held) {
    py::list executables;
    with_stream(device, [&](tpu::Stream& stream) {
      for (const auto& executable : tpu::Region::end(stream, results, and_held)) {
        executables.append(py::handle(executable.get()));
      }
    });
    return executables;
  });
  m.def("make_process_group", [](int rank, std::vector<int64_t> ranks, double seconds) {
    const auto timeout = std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::duration<double>(seconds));
    return c10::intrusive_ptr<c10d::Backend>(c10::make_intrusive<tpu::ProcessGroup>(rank, std::move(ranks), timeout));
  });
  m.def("forget_programs", [with_stream](int device) {
    with_stream(device, [](tpu::Stream& stream) { stream.forget_programs(); });
  });
  m.def("move_values", [with_stream](int device, const py::function& moved) {
    with_stream(device, [&](tpu::Stream& stream) {
      stream.move_values([&](PyObject* array) { return moved(py::handle(array)).release().ptr(); });
    });
  });
  m.def("stop_launcher", [with_stream](int device) {
    with_stream(device, [](tpu::Stream& stream) { stream.stop_launcher(); });
  });
  m.def(
      "synchronize",
      [](int device) { tpu::Device::get().synchronize(static_cast<c10::DeviceIndex>(device)); },
      py::call_guard<py::gil_scoped_release>());
  m.def("wait_for_launches", [](int device) { // and for nothing that is only recorded
    const auto index = static_cast<c10::DeviceIndex>(device);
    tpu::Device::get().wait(index, tpu::Device::get().stream(index).num_launched());
  });
  m.def("are_launches_done", [](int device) {
    const auto index = static_cast<c10::DeviceIndex>(device);
    return tpu::Device::get().done(index, tpu::Device::get().stream(index).num_launched());
  });
  m.def(
      "describe_signature", [](uint32_t id) { return py::reinterpret_steal<py::object>(tpu::describe_signature(id)); });
  m.def("summarize_signature", [](uint32_t id) {
    return py::reinterpret_steal<py::object>(tpu::summarize_signature(id));
  });
  m.def(
      "is_box",
      [](const std::vector<int64_t>& base,
         const std::vector<int64_t>& sizes,
         const std::vector<int64_t>& strides,
         int64_t offset) { return tpu::is_box(base, sizes, strides, offset); });
  // None where the tensor is not dense.
  m.def("memory_order", [](const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides) {
    const auto order = tpu::memory_order(sizes, strides);
    return order.dense ? py::object(py::tuple(py::cast(order.permutation))) : py::object(py::none());
  });
  m.def("check_number", [](const std::variant<int64_t, double>& number, c10::ScalarType dtype) {
    tpu::check_number(std::visit([](auto value) { return at::Scalar(value); }, number), dtype);
  });
  m.def("compile_stats", [](int device) { return compile_stats(static_cast<c10::DeviceIndex>(device)); });
  // The signatures of the entries recorded last, oldest first, and how many of them were not launched.  Takes no lock.
  m.def("recent_entries", [](int device) {
    const auto [entries, num_pending] = tpu::Device::get().stream(static_cast<c10::DeviceIndex>(device)).recent.last();
    py::list ids;
    for (const auto* signature : entries) {
      ids.append(signature->id);
    }
    return py::make_tuple(ids, num_pending);
  });
  m.def("fallback_stats", [] { return tpu::Device::get().fallbacks(); });
  m.def("count_fallback", [](const std::string& name) { tpu::Device::get().count_fallback(name); });
  m.def("clear_fallback_stats", [] { tpu::Device::get().clear_fallbacks(); });
  m.def("memory_counters", [](int device) {
    const auto counters = tpu::memory_counters(static_cast<c10::DeviceIndex>(device));
    return py::make_tuple(counters.current, counters.peak, counters.allocations);
  });
  // Of each live buffer, the newest first: its bytes, dtype, dims and the signature of the op that made it (None: the
  // host).
  m.def("live_buffers", [](int device) {
    py::list buffers;
    for (const auto& buffer : tpu::live_buffers(static_cast<c10::DeviceIndex>(device))) {
      py::object maker = buffer.maker == tpu::kNoMaker ? py::object(py::none()) : py::cast(buffer.maker);
      buffers.append(
          py::make_tuple(buffer.nbytes, static_cast<int>(buffer.layout->dtype), py::cast(buffer.layout->dims), maker));
    }
    return buffers;
  });
  m.def("reset_peak_memory", [](int device) { tpu::reset_peak_memory(static_cast<c10::DeviceIndex>(device)); });
  m.def("default_generator", [](int device) {
    return tpu::Device::get().default_generator(static_cast<c10::DeviceIndex>(device));
  });
  m.def("register_lowered_ops", [](const py::list& lowered_ops) {
    tpu::register_lowered_ops(lowered_ops_of(lowered_ops));
  });
  m.def("lease_array", [](const at::Tensor& tensor) { return lease_array(tensor); });
  m.def("tensor_over", &tensor_over);
  // See compiled_graph.h and tpu_backend/compiled/ordinary.py.
  py::class_<tpu::GraphOperator>(m, "GraphOperator")
      .def(py::init<const std::string&, std::vector<std::optional<tpu::GraphValue>>>());
  py::class_<tpu::CompiledGraph>(m, "CompiledGraph")
      .def(py::init<tpu::GraphOperator, std::vector<bool>, std::optional<tpu::GraphOperator>>())
      .def("__call__", &call_compiled_graph);
  // See recorded_step.h and tpu_backend/captured/step.py.
  py::class_<tpu::RecordedStep>(m, "RecordedStep")
      .def(py::init([](int device) {
        return std::make_unique<tpu::RecordedStep>(static_cast<c10::DeviceIndex>(device));
      }))
      .def(
          "finish",
          [](tpu::RecordedStep& step, const py::list& arguments, const std::vector<at::Tensor>& results) {
            return described(step.finish(arguments, results));
          })
      .def("abandon", &tpu::RecordedStep::abandon)
      .def(
          "difference",
          [](const tpu::RecordedStep& step, const tpu::RecordedStep& other) {
            return described(step.difference(other));
          })
      .def("numbers", &numbers_of)
      .def("uses", &tpu::RecordedStep::uses)
      .def("make_replayable", &make_replayable)
      .def("replay", &tpu::RecordedStep::replay);
}
