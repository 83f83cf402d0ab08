"""A checkpoint written in the background leaves the processors to the training, until it is waited for."""

import threading
import time

from tests.tputrain.resumable_run import build
from tputrain.checkpoint.pace import Pace


def work(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def seconds_of(call) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def test_a_thread_rests_many_times_as_long_as_it_works_and_no_longer_than_it_may():
    rested: list[float] = []

    def run() -> None:
        pace = Pace(longest=0.5)
        for _ in range(3):
            work(0.01)
            rested.append(seconds_of(pace.rest))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert rested[0] >= 0.4
    assert sum(rested[:2]) >= 0.5
    assert rested[2] < 0.1


def test_who_is_waited_for_does_not_rest():
    pace = Pace(longest=60.0)
    work(0.05)
    threading.Timer(0.05, pace.hurry).start()
    assert seconds_of(pace.rest) < 1.8  # 2 is what it would be
    work(0.05)
    assert seconds_of(pace.rest) < 0.5


def test_a_save_that_is_waited_for_is_hurried(tmp_path, monkeypatch):
    """Were it not, this test would not end."""

    class Waits(Pace):
        def rest(self) -> None:
            self._hurried.wait()

    monkeypatch.setattr("tputrain.snapshot.background.Pace", Waits)
    trainer = build(tmp_path)
    trainer.fit()
    assert [path.name for path in sorted((tmp_path / "checkpoints").iterdir())] == [
        "step-12",
        "step-14",
        "step-9",
    ]
