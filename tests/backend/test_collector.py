"""Python's garbage collector and the first use of the device."""

import gc

import pytest
import torch

from tests.backend.fresh_process import run_python
from tpu_backend.collector import importing

FIRST_USE = """
import gc
import torch

found = []
gc.callbacks.append(lambda phase, info: found.append(info["generation"]) if phase == "start" else None)
import tpu_backend.runtime
assert found == [2], found
assert gc.isenabled()
assert gc.get_freeze_count() > 100_000
before = gc.get_stats()[2]["collections"]
assert (torch.ones(3, device="tpu") + 1).tolist() == [2, 2, 2]
assert gc.get_stats()[2]["collections"] == before, "all that was imported has been looked through"
"""


@pytest.fixture
def thawed():
    """As in a process where nobody has frozen anything (tests/conftest.py does)."""
    gc.unfreeze()
    yield
    gc.freeze()


def test_the_first_use_looks_through_the_modules_once() -> None:
    done = run_python(FIRST_USE)
    assert done.returncode == 0, done.stderr


@pytest.mark.usefixtures("thawed")
def test_garbage_that_was_made_while_importing_is_collected_and_not_frozen() -> None:
    class Cycle:
        def __init__(self, died: list[bool]) -> None:
            self.own, self.died = self, died

        def __del__(self) -> None:
            self.died.append(True)

    died: list[bool] = []
    with importing():
        assert not gc.isenabled()
        Cycle(died)
    assert gc.isenabled()
    assert died
    assert gc.get_freeze_count() > 0


def test_what_was_frozen_stays_so_and_a_collector_that_is_off_stays_off() -> None:
    before: list[None] = []
    gc.freeze()
    gc.disable()
    try:
        with importing():
            made: list[None] = []
        # The collector lists all that it looks after but what is frozen.
        listed = {id(each) for each in gc.get_objects()}
        assert id(before) not in listed
        assert id(made) in listed
        assert not gc.isenabled()
    finally:
        gc.enable()


INTERRUPTED = """
import gc, signal
import torch

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores it
torch.ones(3, device="tpu").cpu()
from tpu_backend import _C

def interrupted(phase, info):
    if phase == "start":
        signal.raise_signal(signal.SIGINT)

gc.callbacks.append(_C.keeping_interrupts(interrupted))
try:
    gc.collect()
    for _ in range(100):
        pass
except KeyboardInterrupt:
    print("raised")
"""


def test_ctrl_c_in_a_callback_of_the_collector_is_raised_behind_it() -> None:
    done = run_python(INTERRUPTED)
    assert done.stdout.strip() == "raised", done.stderr
    assert "Exception ignored" not in done.stderr


def test_the_callback_of_jax_is_one_that_keeps_interrupts() -> None:
    torch.tpu.init()
    assert not [each for each in gc.callbacks if getattr(each, "__module__", None) == "jax._src.lib"]
