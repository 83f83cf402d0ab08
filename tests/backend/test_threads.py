"""Threads and processes: recorders at once, autograd's and DataLoader's workers, forks, the end."""

import gc
import os
import signal
import threading
from collections.abc import Callable

import jax
import pytest
import torch
from torch import nn

from tests.backend.fresh_process import run_python
from tpu_backend import jax_op, to_jax

SECONDS = 60


def _together(*functions: Callable[[], object]) -> list[object]:
    """Run each in a thread of its own, all at once; returns the results.  Fails when one hangs or raises."""
    results: list[object] = [None] * len(functions)
    start = threading.Barrier(len(functions))

    def run(place: int) -> None:
        start.wait()
        try:
            results[place] = functions[place]()
        except BaseException as error:
            results[place] = error

    threads = [threading.Thread(target=run, args=(place,), daemon=True) for place in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert not any(thread.is_alive() for thread in threads), "deadlock"
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def _count(first: float, reads: bool) -> list[float]:
    x = torch.full((4,), first, device="tpu")
    seen = []
    for step in range(30):
        x = x * 2 - first
        x[1:].add_(1).sub_(1)
        if reads or step == 29:
            seen.append(x.sum().item())
    return seen


@pytest.mark.parametrize("mode", ["debug", "strict"])
def test_threads_that_record_at_once_get_their_own_values(mode):
    with torch.tpu.eager_mode(mode):
        results = _together(*(lambda value=value: _count(value, reads=True) for value in (1.0, 2.0, 3.0)))
    assert results == [[4 * value] * 30 for value in (1.0, 2.0, 3.0)]


def test_threads_that_record_at_once_into_one_fused_stream_get_their_own_values():
    results = _together(*(lambda value=value: _count(value, reads=False) for value in (1.0, 2.0)))
    assert results == [[4.0], [8.0]]


def test_a_thread_that_flushes_does_not_disturb_another():
    done = threading.Event()

    def flush() -> None:
        while not done.is_set():
            torch.tpu.flush()
            torch.tpu.synchronize()
            torch.tpu.compile_stats()

    def work() -> list[float]:
        try:
            with torch.tpu.eager_mode("strict"):
                return [_count(5.0, reads=True)[-1] for _ in range(5)]
        finally:
            done.set()

    assert _together(flush, work)[1] == [20.0] * 5


def _thread_of_backward() -> int | None:
    x = torch.ones(3, device="tpu", requires_grad=True)
    threads = []
    x.register_hook(lambda grad: threads.append(threading.get_ident()))
    (x * x).sum().backward()
    return threads[0]


def test_backward_runs_in_the_thread_that_calls_it_unless_the_user_says_otherwise():
    def look() -> None:
        (torch.ones(3, requires_grad=True) * 2).sum().backward()
        assert torch.autograd.is_multithreading_enabled()  # in a thread without tpu tensors
        with torch.inference_mode(), torch.enable_grad():
            torch.ones(3, device="tpu")
        assert _thread_of_backward() == threading.get_ident()
        with torch.autograd.set_multithreading_enabled(True):
            assert _thread_of_backward() != threading.get_ident()
        assert _thread_of_backward() == threading.get_ident()

    _together(look)
    assert _thread_of_backward() == threading.get_ident()


@pytest.mark.parametrize("is_autograds", [False, True])
def test_backward_passes_of_two_threads_at_once(is_autograds):
    def gradient(value: float) -> list[float]:
        x = torch.full((3,), value, device="tpu", requires_grad=True)
        with torch.autograd.set_multithreading_enabled(is_autograds):
            for _ in range(5):
                x.grad = None
                (x * x).sum().backward()
        return x.grad.tolist()

    with torch.tpu.eager_mode("strict"):
        assert _together(lambda: gradient(1.5), lambda: gradient(2.5)) == [[3.0] * 3, [5.0] * 3]


def test_a_tensor_made_in_one_thread_is_read_and_freed_in_another():
    box = [torch.ones(3, device="tpu") * 2]
    (total,) = _together(lambda: box.pop().sum().item())
    assert total == 6
    before = torch.tpu.memory_allocated()
    _together(lambda: box.append(torch.ones(256, device="tpu") + 1))
    assert box[0].sum().item() == 512
    box.clear()
    assert torch.tpu.memory_allocated() == before


def test_the_current_device_belongs_to_the_thread():
    torch.tpu.set_device(0)
    assert _together(torch.tpu.current_device) == [0]


# ---- what happens while a program is compiled --------------------------------------------------------------

PARTS_WITH_A_FUNCTION = """
    import torch
    from torch import nn
    from tpu_backend import jax_op, to_jax

    scale = torch.full((16,), 2.0, device="tpu")

    @jax_op
    def scaled(x):
        return x * to_jax(scale)

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x):
            return scaled(torch.relu(self.linear(x)))

    model = nn.Sequential(*[Layer() for _ in range(40)]).to("tpu")
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(4, 16, device="tpu")
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        print(loss.isfinite().item(), torch.tpu.compile_stats()["segments_in_parts"] > 0)
"""


def test_a_function_that_reads_a_tensor_is_compiled_by_the_threads_of_a_step_in_parts():
    done = run_python(PARTS_WITH_A_FUNCTION, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "True True\n" * 2


class _Lowered:
    """An operator that calls a function of the test's when a program with it is compiled, and not when the
    operator is met first.
    """

    def __init__(self) -> None:
        self.when_compiled: Callable[[], object] | None = None
        self.raised: BaseException | None = None
        self.operator = jax_op(self._double)

    def _double(self, x: jax.Array) -> jax.Array:
        if self.when_compiled is not None:
            call, self.when_compiled = self.when_compiled, None
            call()
        return x * 2

    def __call__(self, x: torch.Tensor, when_compiled: Callable[[], object]) -> torch.Tensor:
        result = self.operator(x)
        self.when_compiled = when_compiled
        return result


def test_others_record_read_and_share_values_while_a_program_is_compiled():
    x = torch.full((3,), 5.0, device="tpu")
    torch.tpu.synchronize()
    seen: list[object] = []
    double = _Lowered()

    def use_the_device() -> None:
        y = x.clone()
        y += 1
        seen.extend((x.sum().item(), torch.tpu.compile_stats()["compilations"] >= 0, x.cpu().tolist()))

    result = double(x, lambda: _together(lambda: (x * 3, x.clone(), torch.tpu.compile_stats(), x.cpu())))
    assert result.tolist() == [10.0] * 3
    use_the_device()
    assert seen == [15.0, True, [5.0] * 3]


def test_who_wants_a_value_that_is_being_compiled_waits_and_runs_after_it():
    x = torch.full((3,), 7.0, device="tpu")
    double, compiling, seen = _Lowered(), threading.Event(), []
    result = double(x, lambda: (compiling.set(), seen.append(reader.is_alive()), recorded.wait(SECONDS)))
    recorded = threading.Event()

    def read() -> None:
        compiling.wait(SECONDS)
        more = result + 1  # is recorded while that is compiled
        recorded.set()
        seen.extend((result.tolist(), more.tolist()))

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    torch.tpu.flush()
    seen.append("flushed")
    reader.join(SECONDS)
    assert not reader.is_alive(), "deadlock"
    assert seen[0] is True
    assert sorted(map(str, seen[1:])) == ["[14.0, 14.0, 14.0]", "[15.0, 15.0, 15.0]", "flushed"]


def test_a_function_that_reads_what_its_own_program_computes_is_told_so():
    x = torch.full((3,), 9.0, device="tpu")
    torch.tpu.flush()
    pending = x * 4
    double = _Lowered()
    result = double(pending, lambda: to_jax(pending))
    with pytest.raises(RuntimeError, match=r"being compiled right now.*cannot wait for that: read it before"):
        result.cpu()
    assert (x * 4).tolist() == [36.0] * 3
    # ... and so is a finalizer, which takes nothing with it
    unraisable = []

    class Holder:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor, self.me = tensor, self

        def __del__(self) -> None:
            try:
                unraisable.append(self.tensor.tolist())
            except RuntimeError as error:
                unraisable.append(str(error).splitlines()[0])

    done = x * 8
    done.tolist()
    pending = x * 6
    holders = [Holder(pending), Holder(done)]

    def drop() -> None:
        holders.clear()
        gc.collect()

    later: list[torch.Tensor] = []
    result = double(pending, lambda: (drop(), later.append(pending + 1)))
    assert result.tolist() == [108.0] * 3
    assert len(unraisable) == 2
    assert [72.0] * 3 in unraisable
    assert any("being compiled right now" in str(each) for each in unraisable)
    assert (pending.tolist(), later[0].tolist()) == ([54.0] * 3, [55.0] * 3)


def test_ctrl_c_while_a_program_is_compiled_keeps_what_others_recorded_meanwhile():
    x = torch.full((3,), 11.0, device="tpu")
    double = _Lowered()
    later: list[torch.Tensor] = []

    def interrupt() -> None:
        _together(lambda: later.append(result + 1))
        raise KeyboardInterrupt

    result = double(x, interrupt)
    with pytest.raises(KeyboardInterrupt):
        result.cpu()
    assert later[0].tolist() == [23.0] * 3
    assert result.tolist() == [22.0] * 3


@pytest.mark.parametrize("read", [torch.Tensor.cpu, torch.Tensor.tolist], ids=["cpu", "tolist"])
def test_ctrl_c_is_noticed_by_who_waits_for_another_threads_program(read):
    x = torch.full((3,), 13.0, device="tpu")
    double, compiling, seen = _Lowered(), threading.Event(), threading.Event()
    noticed: list[bool] = []
    result = double(x, lambda: (compiling.set(), noticed.append(seen.wait(SECONDS))))
    compiler = threading.Thread(target=torch.tpu.flush, daemon=True)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        compiler.start()
        assert compiling.wait(SECONDS)
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            read(result)
    finally:
        signal.signal(signal.SIGINT, before)
        seen.set()
    assert result.tolist() == [26.0] * 3
    compiler.join(SECONDS)
    assert noticed == [True]


def test_another_thread_records_while_a_captured_step_is_compiled():
    weight = torch.full((3,), 2.0, device="tpu")
    double = _Lowered()
    seen: list[torch.Tensor] = []

    @torch.tpu.capture
    def step(x: torch.Tensor) -> torch.Tensor:
        y = double.operator(x) + weight
        weight.add_(1)
        return y

    double.when_compiled = None
    inputs = torch.ones(3, device="tpu")
    double.operator(inputs).cpu()
    double.when_compiled = lambda: _together(lambda: seen.append(weight * 10))
    results = [step(inputs).tolist()[0] for _ in range(5)]
    assert step.problem is None
    assert results == [4.0, 5.0, 6.0, 7.0, 8.0]
    assert weight.tolist() == [7.0] * 3
    assert seen[0].tolist() == [30.0] * 3


# ---- DataLoader and forks ----------------------------------------------------------------------------------


class _Squares(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        assert torch.tpu._is_in_bad_fork()
        return torch.tensor([float(index), float(index) ** 2]) + torch.randn(()) * 0


@pytest.mark.filterwarnings("ignore:os.fork")  # pytest undoes the filter that the device sets
def test_a_data_loader_with_workers_feeds_a_device_in_use():
    weight = torch.ones(2, device="tpu", requires_grad=True)
    (weight * 2).sum().backward()
    pending = weight * 3  # recorded, not run, when the workers are forked
    loader = torch.utils.data.DataLoader(_Squares(), batch_size=4, num_workers=2, timeout=SECONDS)
    seen = [((batch.to("tpu") * weight).sum()).item() for _ in range(2) for batch in loader]
    assert seen == [20, 148, 20, 148]  # 0+1+2+3 + 0+1+4+9, 4+5+6+7 + 16+25+36+49
    assert pending.sum().item() == 6
    assert not torch.tpu._is_in_bad_fork()


FORK = """
    import multiprocessing, os, sys, torch

    def child(tensor, queue):
        said = []
        for use in (
            lambda: torch.ones(2, device="tpu"),
            lambda: tensor + 1,
            lambda: tensor.cpu(),
            lambda: tensor.fill_(1),
            lambda: tensor.copy_(torch.zeros(2)),
            torch.tpu.synchronize,
            torch.tpu.flush,
        ):
            try:
                use()
                said.append("nothing")
            except RuntimeError as error:
                said.append(str(error).splitlines()[0])
        said.append(str(torch.tpu._is_in_bad_fork()))
        said.append(str((torch.ones(2) @ torch.ones(2)).item()))
        queue.put(said)

    tensor = torch.ones(2, device="tpu") * 1
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    process = context.Process(target=child, args=(tensor, queue))
    process.start()
    *uses, forked, product = queue.get(timeout=60)
    process.join(60)
    assert process.exitcode == 0
    assert (forked, product) == ("True", "2.0")
    for said in uses:
        print(said)
    assert tensor.sum().item() == 2
"""


def test_a_forked_process_is_told_that_it_cannot_use_the_device():
    done = run_python(FORK)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    # A synchronisation has nothing to wait for there.
    assert lines[5] == "nothing"
    for said in lines[:5] + lines[6:]:
        assert said.startswith("the tpu device cannot be used in a forked process"), lines
        assert 'multiprocessing\'s "spawn" or "forkserver"' in said
    assert done.stderr.splitlines() == ["device tpu → XLA:CPU (no TPU found)"]


# ---- the end of a process ----------------------------------------------------------------------------------

ENDINGS = {
    "with pending work, live tensors, cycles and a daemon thread": """
        import threading, torch
        model = torch.nn.Linear(4, 4).to("tpu")
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(2, 4, device="tpu")).sum().backward()
        optimizer.step()
        event = torch.tpu.Event()
        event.record()
        pending = model.weight * 2

        class Holder:
            def __init__(self):
                self.me, self.x = self, torch.ones(4, device="tpu") + 1
            def __del__(self):
                self.x.add_(1)

        holders = [Holder() for _ in range(3)]
        recorded = threading.Event()
        def record():
            y = pending + 1
            torch.tpu.flush()
            z = y * 2
            recorded.set()
            threading.Event().wait()

        threading.Thread(target=record, daemon=True).start()
        recorded.wait()
        """,
    "in an exit handler that reads": """
        import atexit, torch
        x = torch.ones(4, device="tpu") * 2
        atexit.register(lambda: print(x.sum().item()))
        """,
}


@pytest.mark.parametrize("name", ENDINGS)
def test_a_process_ends_quietly(name):
    done = run_python(ENDINGS[name])
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines() == ["device tpu → XLA:CPU (no TPU found)"]
    if "reads" in name:
        assert done.stdout == "8.0\n"


def test_sys_exit_in_a_hook_ends_the_process_with_its_code():
    done = run_python(
        """
        import sys, time, torch
        x = torch.ones(3, device="tpu", requires_grad=True)
        x.register_hook(lambda gradient: sys.exit(7))
        try:
            (x * 2).sum().backward()
        finally:
            # PyTorch's thread lets go of the exception after it was raised here, and needs the GIL for that:
            # on a machine so busy that the interpreter is gone by then, the process is aborted.
            time.sleep(1)
        """
    )
    assert done.returncode == 7, done.stderr


def test_a_module_trains_in_a_thread_of_its_own():
    def train() -> float:
        model = nn.Linear(3, 1, bias=False).to("tpu")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.eye(3).to("tpu")
        for _ in range(20):
            optimizer.zero_grad()
            loss = (model(x) - 2).square().mean()
            loss.backward()
            optimizer.step()
        return loss.item()

    (loss,) = _together(train)
    assert loss < 2


def test_a_finalizer_that_launches_the_same_program_leaves_the_numbers_of_the_launch():
    """The collector may run it while a launch makes its arguments: what is shared and donated is copied."""

    class Cycle:
        def __init__(self) -> None:
            self.me = self

        def __del__(self) -> None:
            nonlocal num_finalized
            gc.disable()
            num_finalized += 1
            other.mul_(5.0)

    num_finalized = 0
    other = torch.ones(3, device="tpu")
    with torch.tpu.eager_mode("strict"):
        for _ in range(2):  # nothing is compiled below
            first = torch.ones(3).to("tpu")
            kept = first.clone()
            first.mul_(2.0)
            other.mul_(5.0)
        torch.tpu.synchronize()
        gc.collect()
        thresholds, num_inside = gc.get_threshold(), 0
        try:
            for allocations in range(1, 40):
                gc.disable()
                shared = torch.ones(3).to("tpu")
                kept = shared.clone()
                torch.tpu.synchronize()
                gc.collect()
                Cycle()
                before = num_finalized
                gc.set_threshold(gc.get_count()[0] + allocations, 1000, 1000)
                gc.enable()
                shared.mul_(2.0)
                gc.disable()
                num_inside += num_finalized - before
                assert shared.tolist() == [2.0] * 3
                assert kept.tolist() == [1.0] * 3
        finally:
            gc.set_threshold(*thresholds)
            gc.enable()
    assert num_inside > 0
