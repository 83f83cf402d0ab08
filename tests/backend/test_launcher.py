"""Programs of many buffers that a captured step hands to a thread: order, errors, other threads, the end."""

import gc
import threading
from dataclasses import replace

import pytest
import torch

from tests.backend.fresh_process import run_python
from tpu_backend.runtime import compiler

MANY = 40  # tensors: more than a program may have that is launched at once


class Counters:
    """Many tensors that a captured step counts up in place."""

    def __init__(self, size: int = 3) -> None:
        self.size = size
        self.values = [torch.full((size,), float(number), device="tpu") for number in range(MANY)]
        self.step = torch.tpu.capture(self._step)
        self.steps_done = 0

    def _step(self, by: torch.Tensor) -> torch.Tensor:
        for value in self.values:
            value.add_(by)
        return self.values[0] * 2

    def go(self, steps: int) -> torch.Tensor:
        for _ in range(steps):
            result = self.step(torch.ones(self.size, device="tpu"))
        self.steps_done += steps
        return result

    def go_and_wait(self, steps: int) -> None:
        self.go(steps)
        torch.tpu.synchronize()

    def check(self) -> None:
        for number, value in enumerate(self.values):
            assert value.tolist() == [number + self.steps_done] * self.size


def replays() -> int:
    return torch.tpu.compile_stats()["replays"]


def test_what_is_recorded_and_read_between_replays_sees_them_in_order():
    counters = Counters()
    counters.go(3)
    before = replays()
    for number in range(4, 9):
        result = counters.go(1)
        total = counters.values[1] + result  # recorded on what is in flight
        assert result.tolist() == [2 * number] * 3
        assert total.tolist() == [3 * number + 1] * 3
        with torch.no_grad():
            counters.values[2].sub_(0)  # another program between the two
    assert replays() == before + 5
    counters.check()


def test_a_tensor_that_is_read_elsewhere_is_not_overwritten():
    counters = Counters()
    counters.go(4)
    before = [value.detach() for value in counters.values]  # the same memory
    copies = [value.clone() for value in counters.values]
    counters.go(3)
    assert [each.tolist() for each in before] == [value.tolist() for value in counters.values]
    assert [each.tolist() for each in copies] == [[number + 4] * 3 for number in range(MANY)]


def test_two_threads_replay_two_steps():
    all_counters = [Counters(), Counters()]
    for counters in all_counters:
        counters.go(5)  # recorded
    before = replays()
    threads = [threading.Thread(target=counters.go, args=(40,)) for counters in all_counters]
    for thread in threads:
        thread.start()
    for _ in range(8):  # meanwhile this one records, reads and collects
        assert (torch.ones(3, device="tpu") * 2).tolist() == [2] * 3
        gc.collect()
    for thread in threads:
        thread.join()
    assert replays() == before + 80
    for counters in all_counters:
        counters.check()


@pytest.fixture
def faults(monkeypatch):
    """What is put in here fails the next launch of a large program that was compiled in the test."""
    compile_, faults = compiler._compile, []

    def compile_faulty(*args):
        executable = compile_(*args)

        def execute(arrays, **kwargs):
            if faults and len(arrays) >= MANY:
                raise RuntimeError(faults.pop())
            return executable.execute(arrays, **kwargs)

        return replace(executable, execute=execute)

    monkeypatch.setattr(compiler, "_compile", compile_faulty)
    return faults


@pytest.mark.parametrize(
    ("fault", "error", "size"),  # a size that no other test has compiled
    [
        ("a fault of the test", RuntimeError, 5),
        ("RESOURCE_EXHAUSTED: a fault of the test", torch.OutOfMemoryError, 7),
    ],
)
def test_a_launch_that_fails_is_raised_once_and_what_it_was_to_write_says_so(faults, fault, error, size):
    counters = Counters(size)
    counters.go(4)
    torch.tpu.synchronize()
    faults.append(fault)
    with pytest.raises(error, match="a fault of the test"):
        counters.go_and_wait(3)  # at the latest when the queue is full
    torch.tpu.synchronize()  # once
    with pytest.raises(RuntimeError, match=r"(?s)no value.*a fault of the test"):
        counters.values[3].tolist()
    with pytest.raises(RuntimeError, match="a fault of the test"):
        (counters.values[4] + 1).tolist()
    with pytest.raises(RuntimeError, match="a fault of the test"):
        counters.go_and_wait(1)

    for number, value in enumerate(counters.values):  # the device is as usable as before
        value.fill_(float(number))
    counters.steps_done = 0
    counters.go(4)
    counters.check()


def test_a_process_ends_with_launches_under_way():
    script = (
        "from tests.backend.test_launcher import Counters\n"
        "counters = Counters()\n"
        "counters.go(30)\n"
        "print(counters.step.problem)\n"
    )
    ended = run_python(script)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "None\n"
    assert "Error" not in ended.stderr
    assert "Traceback" not in ended.stderr


def test_what_is_replaced_is_not_copied():
    script = (
        "from tpu_backend.runtime import transfer\n"
        "copies, copy = [], transfer.copy\n"
        "transfer.copy = lambda array: copies.append(array) or copy(array)\n"
        "from tests.backend import test_launcher\n"
        "for many in (20, 40):\n"
        "    test_launcher.MANY = many\n"
        "    counters = test_launcher.Counters()\n"
        "    counters.go(5)\n"
        "    copies.clear()\n"
        "    counters.go(10)\n"
        "    print(many, counters.step.problem, len(copies))\n"
    )
    ended = run_python(script)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "20 None 0\n40 None 0\n"


def test_finalizers_use_the_device_while_a_thread_launches():
    done = []

    values = torch.ones(2, device="tpu")
    torch.tpu.synchronize()

    class Sums:
        def __init__(self) -> None:
            self.values, self.me = values, self  # only the collector frees it

        def __del__(self) -> None:
            done.append(self.values.sum().item())

    counters = Counters()
    counters.go(5)
    for number in range(200):
        Sums()
        if number % 10 == 0:
            torch.tpu.capture(Counters(2)._step)(torch.ones(2, device="tpu"))  # a step that becomes garbage
        counters.go(1)
    gc.collect()
    assert done == [2.0] * 200
    counters.check()


def test_steps_that_take_turns_on_the_same_tensors():
    weights = [torch.zeros(3, device="tpu") for _ in range(MANY)]
    sums = [torch.zeros(3, device="tpu") for _ in range(MANY)]

    @torch.tpu.capture
    def add_up(by):
        for total, weight in zip(sums, weights, strict=True):
            total.add_(weight + by)
        return sums[0] * 1

    @torch.tpu.capture
    def update(by):
        for total, weight in zip(sums, weights, strict=True):
            weight.add_(total * by)
        return weights[0] * 1

    weight = total = 0.0
    for _ in range(12):
        add_up(torch.ones(3, device="tpu"))
        update(torch.full((3,), 0.5, device="tpu"))
        total += weight + 1
        weight += total * 0.5
    assert all(each.tolist() == [weight] * 3 for each in weights)
    assert all(each.tolist() == [total] * 3 for each in sums)
