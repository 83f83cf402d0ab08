"""What holds for every test: no network, and the same examples in every run."""

import gc
import os
import signal
import warnings
from collections.abc import Iterator

import hypothesis
import pytest

# Before any test imports these libraries: they read the switches when they are imported.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["WANDB_MODE"] = "disabled"
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# Commands would keep programs in the home of whoever runs the tests, and find there what is to be compiled.
os.environ["TPU_CACHE_DIR"] = "none"

# A compilation takes as long as it takes, and what fails once must fail again for whoever looks at it.
hypothesis.settings.register_profile("reproducible", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("reproducible")


@pytest.fixture(autouse=True, scope="module")
def freeze_older_objects() -> None:
    """Imports and programs so far stay: without this every run of a Trainer collects among all of them."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def handlers_of_signals_are_put_back(request: pytest.FixtureRequest) -> Iterator[None]:
    """Else a test of another file, later in this process, would miss an interrupt. Which file has left one is
    among the warnings: it was seen once, and the file is not known yet.
    """
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        if (left := signal.getsignal(number)) != handler:
            warnings.warn(f"{request.module.__name__} has left {left} for {number!r}", stacklevel=1)
            signal.signal(number, handler)


def pytest_xdist_auto_num_workers() -> int:
    """Three for two cores: tests of many ranks wait for much of their time, for deadlines and for peers."""
    return (os.cpu_count() or 1) * 3 // 2
