"""What a signal does to a process that trains, also to one that hangs."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

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
            time.sleep(60)
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


def start(script: str) -> subprocess.Popen:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-c", script], text=True, env=environment, **pipes)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_second_signal_ends_a_process_whose_main_thread_hangs(number, code):
    with start(HANGS) as process:
        try:
            assert process.stdout.readline() == "hangs\n"
            process.send_signal(number)
            assert process.stderr.readline() == "\n"
            name = signal.Signals(number).name
            assert process.stderr.readline().startswith(f"{name}: saving after this step")
            process.send_signal(number)
            assert process.wait(timeout=30) == code
            assert process.stderr.read().strip().startswith(f"{name} again: leaving at once")
        finally:
            process.kill()


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
