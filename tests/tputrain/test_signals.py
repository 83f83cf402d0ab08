"""What a signal does to a process that trains, also to one that hangs."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.tputrain.interrupted_run import AT, STEPS, build, device_of
from tputrain.checkpoint.integrity import verify
from tputrain.loggers.jsonl import read_jsonl
from tputrain.signals import SignalWatch

ROOT = Path(__file__).resolve().parents[2]

# A mutex that is locked twice is waited for in C for ever, as a program that hangs on the device is.
HANGS = """
import ctypes
from tputrain.signals import SignalWatch

libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(128)
with SignalWatch():
    libc.pthread_mutex_lock(mutex)
    print("hangs", flush=True)
    libc.pthread_mutex_lock(mutex)
"""

HAS_A_WORKER = """
import os, signal, sys, time
from tputrain.signals import SignalWatch

with SignalWatch() as watch:
    reading, writing = os.pipe()
    worker = os.fork()
    if worker == 0:
        signal.signal(signal.SIGINT, lambda number, frame: os.write(writing, b"x"))
        os.write(writing, b"x")
        while True:
            time.sleep(0.01)  # a signal just before a long sleep would wait for its end
    os.read(reading, 1)
    for _ in range(3):
        os.kill(worker, signal.SIGINT)
        os.read(reading, 1)
    os.kill(worker, signal.SIGKILL)
    os.waitpid(worker, 0)
    os.kill(os.getpid(), signal.SIGINT)
    received = watch.received
print("received", received)
"""


ENDS_SLOWLY = """
import atexit, signal, sys, threading, time
from tputrain.signals import SignalWatch

atexit.register(print, "the end", flush=True)
with SignalWatch() as watch, watch.raised_at_the_end():
    signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGINT)  # as `timeout` does: to the process, then to its group
    threading.Event().wait(1.0)
    threading.Thread(target=time.sleep, args=(float(sys.argv[1]),)).start()
    print("here", flush=True)
"""

# An exception is only printed in a callback of the collector, and in a finalizer.
COLLECTS = """
import gc, os, signal, sys, time
from tputrain.cli import command

number, come = int(sys.argv[1]), []

class Finalized:
    def __del__(self):
        os.kill(os.getpid(), number)

def collecting(phase, info):
    if not come:
        come.append(phase)
        os.kill(os.getpid(), number)

def starts(chosen):
    if sys.argv[2] == "collector":
        gc.callbacks.append(collecting)
        gc.collect()
    else:
        Finalized()
    time.sleep(60)

command._dispatch = starts
sys.exit(command.main(["doctor"]))
"""


def start(script: str, *arguments: str) -> subprocess.Popen:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-c", script, *arguments], text=True, env=environment, **pipes)


def test_who_saves_nothing_does_not_say_so(capfd):
    with SignalWatch(saves=False):
        os.kill(os.getpid(), signal.SIGTERM)
    assert capfd.readouterr().err.strip() == "SIGTERM: leaving after this step (again: leave at once)"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_second_signal_ends_a_process_whose_main_thread_hangs(number, code):
    with start(HANGS) as process:
        try:
            assert process.stdout.readline() == "hangs\n"
            process.send_signal(number)
            assert process.stderr.readline() == "\n"
            name = signal.Signals(number).name
            assert process.stderr.readline().startswith(f"{name}: saving after this step")
            until = time.monotonic() + 30
            while process.poll() is None and time.monotonic() < until:
                process.send_signal(number)  # within half a second it is the first one again
                time.sleep(0.1)
            assert process.wait(timeout=1) == code
            assert process.stderr.read().strip().startswith(f"{name} again: leaving at once")
        finally:
            process.kill()


@pytest.mark.parametrize("where", ["collector", "finalizer"])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_command_ends_in_time_where_nothing_can_be_raised(number, code, where):
    began = time.monotonic()
    with start(COLLECTS, str(int(number)), where) as process:
        _, err = process.communicate(timeout=60)
    assert process.returncode == code
    assert err == "tputrain: interrupted\n"
    assert time.monotonic() - began < 2.9  # the time after which a thread ends what does not leave


def test_a_signal_that_comes_twice_at_once_is_one():
    with start(ENDS_SLOWLY, "0") as process:
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "here\nthe end\n")
    assert err.strip() == "SIGINT: saving after this step, then leaving (again: leave at once)"


def test_a_process_that_ends_after_a_signal_leaves_at_once_at_another_and_without_a_word():
    with start(ENDS_SLOWLY, "60") as process:
        assert process.stdout.readline() == "here\n"
        began = time.monotonic()
        while process.poll() is None and time.monotonic() < began + 30:
            process.send_signal(signal.SIGINT)
            time.sleep(0.1)
        code, out, err = process.wait(timeout=1), process.stdout.read(), process.stderr.read()
    assert (code, out) == (130, "")
    assert "Traceback" not in err


def test_signals_to_a_worker_are_not_counted_as_the_run_s_own():
    with start(HAS_A_WORKER) as process:
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, f"received {int(signal.SIGINT)}\n"), err
    assert err.count("SIGINT: saving after this step") == 1


def test_after_a_watch_everything_is_as_before():
    def state() -> tuple:
        wakeup = signal.set_wakeup_fd(-1)
        signal.set_wakeup_fd(wakeup)
        return wakeup, signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)

    before, watch = state(), SignalWatch()
    for _ in range(2):
        with watch:
            assert state() != before
            assert watch.received is None
            os.kill(os.getpid(), signal.SIGTERM)
            assert watch.received == signal.SIGTERM
        assert watch.received is None
        assert state() == before


def losses(run_dir: Path, name: str = "metrics.jsonl") -> list[tuple[int, str]]:
    return [(record["step"], record["loss_hex"]) for record in read_jsonl(run_dir / name)]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @cache
    def train(device: str) -> Path:
        run_dir = tmp_path_factory.mktemp("uninterrupted")
        build(run_dir, device=device).fit()
        assert [step for step, _ in losses(run_dir)] == list(range(1, STEPS + 1))
        return run_dir

    return train


@pytest.mark.parametrize(
    ("where", "step"),
    [
        ("data", AT),
        ("evaluation-data", AT + 1),
        ("start", 0),
        ("first-step", 0),
        ("new-size", 2),
        ("resumed", AT + 1),
        ("saving", None),
    ],
)
def test_sigterm_wherever_it_comes_ends_in_a_complete_checkpoint_and_loses_no_step(
    tmp_path, uninterrupted, where, step
):
    command = [sys.executable, "-m", "tests.tputrain.interrupted_run", str(tmp_path), where]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(command, cwd=ROOT, text=True, **pipes) as process:
        try:
            while not (line := process.stdout.readline()).endswith("here\n"):
                assert line, process.stderr.read()
            began = time.monotonic()
            process.send_signal(signal.SIGTERM)
            process.stdin.close()
            code = process.wait(timeout=60)
            took = time.monotonic() - began
            assert code == 143, process.stderr.read()
        finally:
            process.kill()
    assert took < 30
    saved = max((tmp_path / "checkpoints").glob("step-*"), key=lambda path: int(path.name[5:]))
    verify(saved)
    assert step is None or saved.name == f"step-{step}"
    assert len(losses(tmp_path)) == int(saved.name[5:])
    whole = uninterrupted(device_of(where))
    build(tmp_path, device=device_of(where)).fit()
    assert losses(tmp_path) == losses(whole)
    assert losses(tmp_path, "evaluations.jsonl") == losses(whole, "evaluations.jsonl")


def test_a_wait_is_given_up_when_a_signal_comes_and_not_begun_after_one():
    began: list[str] = []

    def wait() -> str:
        began.append("wait")
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait(60)
        return "never"

    with SignalWatch() as watch:
        assert watch.wait_for(lambda: "batch") == "batch"
        assert watch.wait_for(wait) is None
        assert watch.received == signal.SIGTERM
        assert watch.wait_for(wait) is None
    assert began == ["wait"]


def test_a_signal_outside_of_a_wait_breaks_nothing():
    with SignalWatch() as watch:
        assert watch.wait_for(lambda: 1) == 1
        os.kill(os.getpid(), signal.SIGTERM)
        assert watch.received == signal.SIGTERM


def test_a_rescue_is_called_once_the_grace_is_over_unless_it_is_withdrawn():
    called = threading.Event()

    class Hasty(SignalWatch):
        grace = 0.01

    for is_withdrawn in (True, False):
        with Hasty() as watch:
            watch.rescue_by(lambda number: called.set())
            if is_withdrawn:
                watch.rescue_by(None)
            os.kill(os.getpid(), signal.SIGTERM)
            assert called.wait(0.5 if is_withdrawn else 30) is not is_withdrawn


def test_handlers_are_put_back_where_another_signal_breaks_the_end_off(monkeypatch):
    """PyTorch raises in whatever line it comes by that a loader's worker was killed."""
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    watch = SignalWatch()

    def killed() -> None:
        raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed.")

    with pytest.raises(RuntimeError, match="is killed"):
        with watch:
            monkeypatch.setattr(watch._listener, "join", killed)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
