"""Python's garbage collector and the first use of the device."""

import gc

from tests.backend.fresh_process import run_python
from tpu_backend.collector import importing

FIRST_USE = """
import gc
import torch

found = []
gc.callbacks.append(lambda phase, info: found.append(info["generation"]) if phase == "start" else None)
before = gc.get_stats()[2]["collections"]
import tpu_backend.runtime
assert found == [], found
assert gc.isenabled() and gc.get_freeze_count() == 0
assert (torch.ones(3, device="tpu") + 1).tolist() == [2, 2, 2]
assert gc.get_stats()[2]["collections"] == before, "all that was imported has been looked through"
"""


def test_the_first_use_looks_through_no_modules() -> None:
    done = run_python(FIRST_USE)
    assert done.returncode == 0, done.stderr


def test_garbage_that_was_made_while_importing_is_collected_later() -> None:
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
    assert not died
    gc.collect()
    assert died


def test_what_was_frozen_stays_so_and_a_collector_that_is_off_stays_off() -> None:
    gc.freeze()
    gc.disable()
    try:
        count = gc.get_freeze_count()
        with importing():
            pass
        assert gc.get_freeze_count() == count
        assert not gc.isenabled()
    finally:
        gc.enable()
