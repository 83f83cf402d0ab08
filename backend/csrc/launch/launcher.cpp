#include "launch/launcher.h"

#include "python_error.h"

#include <pthread.h>
#include <pybind11/pybind11.h>

#include <thread>

namespace py = pybind11;

namespace tpu {
namespace {

// Queued and running.  One that runs and one that waits keep the thread busy; more would only delay the news of an
// error.
constexpr size_t kDepth = 2;

thread_local bool t_is_launcher = false;

} // namespace

void Launch::run() {
  try {
    py::list arguments = [&] {
      const WithoutCollector without_collector;
      return py::list(inputs.size());
    }();
    for (size_t i = 0; i < inputs.size(); ++i) {
      const auto& [value, is_donated, is_shared] = inputs[i];
      if (value->error != nullptr) {
        error = value->error;
        is_followup = true;
        break;
      }
      PyList_SET_ITEM(arguments.ptr(), static_cast<Py_ssize_t>(i), argument_of(*value, is_donated, is_shared));
    }
    if (error == nullptr) {
      auto started = ProgramCache::start(specialization->links.front(), arguments.ptr(), numbers);
      for (size_t i = 0; i < outputs.size(); ++i) {
        outputs[i]->array = Py_NewRef(PyList_GET_ITEM(started.arrays.ptr(), static_cast<Py_ssize_t>(i)));
      }
      if (specialization->links.front().has_bounds_checks) {
        out_of_range =
            shared_reference(Py_NewRef(PyList_GET_ITEM(started.arrays.ptr(), static_cast<Py_ssize_t>(outputs.size()))));
      }
      token = std::move(started.token);
    }
  } catch (const py::error_already_set& raised) {
    if (!is_queued && is_interrupt(raised)) {
      throw;
    }
    error = std::make_shared<const std::string>(raised.what());
  } catch (const std::exception& raised) {
    error = std::make_shared<const std::string>(raised.what());
  }
  for (auto& [value, is_donated, is_shared] : inputs) {
    if (is_donated) {
      const bool is_spare = value.use_count() == 1 && !value->is_remembered;
      if (is_spare) {
        value->reset();
      }
      spare.push_back(is_spare ? std::move(value) : ValuePtr());
    }
  }
  inputs.clear();
  if (error != nullptr) {
    const auto why = is_followup ? error : std::make_shared<const std::string>(kProgramFailed + *error);
    for (const auto& output : outputs) {
      output->error = why;
    }
  }
}

WithoutCollector::WithoutCollector() : was_on_(t_is_launcher && PyGC_Disable() != 0) {}

WithoutCollector::~WithoutCollector() {
  if (was_on_) {
    PyGC_Enable();
  }
}

bool Launcher::is_this_thread() {
  return t_is_launcher;
}

void Launcher::add(std::unique_ptr<Launch> launch) {
  std::unique_lock lock(mutex_);
  if (!std::exchange(has_thread_, true)) {
    std::thread([this] { work(); }).detach(); // a launcher lives as long as the process
  }
  wait_for(lock, [&] { return queue_.size() + (is_running_ ? 1 : 0) < kDepth; });
  launch->is_queued = true;
  queue_.push_back(std::move(launch));
  wanted_.notify_one();
}

std::vector<std::unique_ptr<Launch>> Launcher::take_done() {
  std::lock_guard guard(mutex_);
  return std::exchange(done_, {});
}

void Launcher::wait() {
  std::unique_lock lock(mutex_);
  wait_for(lock, [&] { return queue_.empty() && !is_running_; });
}

// The thread wants the GIL, so nobody waits for it with the GIL in hand.
template <class Condition>
void Launcher::wait_for(std::unique_lock<std::mutex>& lock, const Condition& condition) {
  if (condition()) {
    return;
  }
  if (PyGILState_Check() == 0) {
    finished_.wait(lock, condition);
    return;
  }
  lock.unlock();
  {
    py::gil_scoped_release without_gil;
    lock.lock();
    finished_.wait(lock, condition);
    lock.unlock(); // whoever takes the GIL holds no lock that the thread wants
  }
  lock.lock();
}

void Launcher::work() {
  t_is_launcher = true;
  pthread_setname_np(pthread_self(), "tpu_launch");
  std::unique_lock lock(mutex_);
  for (;;) {
    wanted_.wait(lock, [&] { return !queue_.empty(); });
    auto launch = std::move(queue_.front());
    queue_.pop_front();
    is_running_ = true;
    lock.unlock();
    {
      py::gil_scoped_acquire gil;
      launch->run();
    }
    lock.lock();
    is_running_ = false;
    done_.push_back(std::move(launch));
    finished_.notify_all();
  }
}

} // namespace tpu
