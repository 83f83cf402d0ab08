"""Events and streams: times are true, waiting is real, and torch.cuda's ways of using them work."""

import time

import pytest
import torch


def _busy(seconds: float) -> torch.Tensor:
    """Work on the device that was measured to take about this long; dispatched, not waited for."""
    size = 384
    matrix = torch.full((size, size), 1.0 / size, device="tpu")
    torch.tpu.synchronize()
    rounds = 8
    while True:
        start = time.perf_counter()
        for _ in range(rounds):
            matrix = matrix @ matrix
            torch.tpu.flush()
        torch.tpu.synchronize()
        took = time.perf_counter() - start
        if took >= seconds:
            return matrix
        rounds = int(rounds * max(1.5, 1.1 * seconds / took))


@pytest.mark.parametrize("kind", [torch.tpu.Event, lambda **options: torch.Event("tpu", **options)])
def test_elapsed_time_is_the_wall_clock(kind):
    torch.tpu.synchronize()
    start, end = kind(enable_timing=True), kind(enable_timing=True)
    wall = time.perf_counter()
    start.record()
    _busy(0.2)
    end.record()
    end.synchronize()
    wall = (time.perf_counter() - wall) * 1e3
    assert wall >= 200
    assert start.elapsed_time(end) == pytest.approx(wall, rel=0.2)


def test_elapsed_time_covers_work_that_nobody_waited_for():
    """The end event is recorded while the program is still running: its time is when that is done."""
    matrix = torch.full((512, 512), 1.0 / 512, device="tpu")

    def program() -> torch.Tensor:
        result = matrix
        for _ in range(40):
            result = result @ matrix
        return result

    program().sum().item()  # compiled
    start, end = torch.tpu.Event(enable_timing=True), torch.tpu.Event(enable_timing=True)
    wall = time.perf_counter()
    start.record()
    results = []
    while time.perf_counter() - wall < 0.25:
        results.append(program())
        torch.tpu.flush()
    end.record()
    end.synchronize()
    wall = (time.perf_counter() - wall) * 1e3
    assert start.elapsed_time(end) == pytest.approx(wall, rel=0.2)


def test_elapsed_time_wants_timed_and_recorded_events():
    timed, recorded = torch.tpu.Event(enable_timing=True), torch.tpu.Event(enable_timing=True)
    recorded.record()
    with pytest.raises(ValueError, match="must be recorded"):
        recorded.elapsed_time(timed)
    untimed = torch.tpu.Event()
    untimed.record()
    with pytest.raises(ValueError, match="enable_timing=True"):
        untimed.elapsed_time(recorded)


def test_an_event_is_done_when_the_work_before_it_is():
    matrix = torch.full((768, 768), 1.0 / 768, device="tpu")
    event = torch.tpu.Event()
    assert event.query()  # never recorded
    for attempt in range(2):  # the first one compiles
        result = matrix
        for _ in range(60):
            result = result @ matrix
        event.record()
        queried = event.query()
        if attempt == 0:
            event.synchronize()
    assert not queried, "60 matrix products were done at once"
    event.synchronize()
    assert event.query()
    assert torch.tpu.current_stream().query()
    assert result.isfinite().all().item()


def test_an_event_outlives_the_tensors_it_stands_for():
    weight = torch.full((512, 512), 1.0 / 512, device="tpu")
    event = torch.tpu.Event()
    for step in range(3):  # the weight of one step is donated to the next: nobody holds what the event saw
        for _ in range(20):
            weight.copy_(weight @ weight)
        torch.tpu.flush()
        if step == 1:
            event.record()
    event.synchronize()
    assert event.query()
    assert weight.sum().item() == pytest.approx(512, rel=1e-3)


def test_asking_for_an_event_whose_results_are_gone_does_not_wait():
    matrix = torch.full((768, 768), 1.0 / 768, device="tpu")
    event = torch.tpu.Event()
    for attempt in range(2):  # the first one compiles
        result = matrix
        for _ in range(60):
            result = result @ matrix
        event.record()
        torch.tpu.flush()
        del result
        queried = event.query()
        if attempt == 0:
            event.synchronize()
    assert not queried, "60 matrix products were done at once"
    deadline = time.perf_counter() + 60
    while not event.query():
        assert time.perf_counter() < deadline


ASKS = {
    "query": lambda event: event.query(),
    "synchronize": lambda event: event.synchronize(),
    "synchronize of the device": lambda _: torch.tpu.synchronize(),
}


@pytest.mark.parametrize("ask", ASKS)
def test_recording_an_event_runs_nothing_and_asking_for_it_runs_what_came_before(ask):
    torch.tpu.flush()
    before = torch.tpu.compile_stats()["segments_run"]
    event = torch.tpu.Event()
    one = torch.ones(8, device="tpu") + 1
    event.record()
    other = one * 3
    event.wait(torch.tpu.current_stream())
    assert torch.tpu.compile_stats()["segments_run"] == before
    ASKS[ask](event)
    assert torch.tpu.compile_stats()["segments_run"] == before + 1  # with what was recorded behind it
    assert (one.tolist(), other.tolist()) == ([2] * 8, [6] * 8)
    assert torch.tpu.compile_stats()["segments_run"] == before + 1


def test_an_event_is_not_held_back_by_what_is_launched_behind_it():
    matrix = torch.full((512, 512), 1.0 / 512, device="tpu")

    def launch(products: int) -> torch.Tensor:
        result = matrix
        for _ in range(products):
            result = result @ matrix
        return result

    def run() -> tuple[bool, bool]:
        first, event, last = launch(1), torch.tpu.Event(), torch.tpu.Event()
        event.record()
        torch.tpu.flush()
        second = launch(100)
        last.record()
        torch.tpu.flush()
        event.synchronize()
        done = event.query(), last.query()
        assert first.isfinite().all().item()
        assert second.isfinite().all().item()
        return done

    run()  # compiles
    assert (True, False) in [run() for _ in range(5)]


def test_timed_events_run_nothing_and_their_work_is_told_apart():
    matrix = torch.full((512, 512), 1.0 / 512, device="tpu")

    def launch(products: int) -> torch.Tensor:
        result = matrix
        for _ in range(products):
            result = result @ matrix
        return result

    def run() -> tuple[float, float]:
        torch.tpu.synchronize()
        before = torch.tpu.compile_stats()["segments_run"]
        events = [torch.tpu.Event(enable_timing=True) for _ in range(3)]
        kept = [launch(1)]  # pending when the first event is recorded
        events[0].record()
        kept.append(launch(60))
        events[1].record()
        kept.append(launch(2))
        events[2].record()
        assert torch.tpu.compile_stats()["segments_run"] == before
        times = events[0].elapsed_time(events[1]), events[1].elapsed_time(events[2])
        assert torch.tpu.compile_stats()["segments_run"] == before + 3
        return times

    run()  # compiles
    assert any(long > 3 * short > 0 for long, short in (run() for _ in range(5)))


def test_an_event_behind_a_program_that_fails_is_over(monkeypatch):
    from tpu_backend.runtime import compiler

    def refuse(*_: object) -> None:
        raise RuntimeError("refused for the test")

    torch.tpu.flush()
    x = torch.ones(59, device="tpu") * 2
    events = torch.tpu.Event(), torch.tpu.Event(enable_timing=True)
    for event in events:
        event.record()
    monkeypatch.setattr(compiler, "lower_segment", refuse)
    with pytest.raises(RuntimeError, match="refused for the test"):
        events[0].synchronize()
    monkeypatch.undo()
    for event in events:
        event.synchronize()
        assert event.query()
    with pytest.raises(RuntimeError, match="no value"):
        x.cpu()


def test_events_are_instances_of_both_classes():
    event = torch.tpu.Event()
    assert isinstance(event, torch.Event)
    assert isinstance(event, torch.tpu.Event)
    assert isinstance(torch.Event("tpu"), torch.tpu.Event)
    assert not isinstance(torch.Event("cpu"), torch.tpu.Event)
    assert event.device.type == "tpu"


def test_streams_are_used_as_on_cuda():
    stream, current = torch.tpu.Stream(), torch.tpu.current_stream()
    assert isinstance(stream, torch.Stream)
    stream.wait_stream(current)
    with torch.tpu.stream(stream):
        tensor = torch.ones(8, device="tpu") * 3
    event = stream.record_event()
    current.wait_event(event)
    event.wait(current)
    tensor.record_stream(current)
    current.wait_stream(stream)
    stream.synchronize()
    with stream:
        tensor += 1
    with torch.tpu.stream(None):
        tensor += 1
    torch.tpu.set_stream(stream)
    assert torch.tpu.default_stream().device == torch.device("tpu", 0)
    assert tensor.tolist() == [5] * 8
    assert "record_stream" not in str(torch.tpu.fallback_stats())


def test_a_launch_whose_results_were_dropped_is_waited_for() -> None:
    x = torch.full((600, 600), 1e-3, device="tpu")

    def launch() -> tuple[float, float]:
        result = x
        for _ in range(60):
            result = result @ x
        start = time.perf_counter()
        torch.tpu.flush()
        del result
        launched = time.perf_counter()
        torch.tpu.synchronize()
        return launched - start, time.perf_counter() - launched

    launch()  # compiles
    assert any(waiting > launching for launching, waiting in (launch() for _ in range(5)))


def test_a_timed_event_behind_the_optimizer_does_not_split_the_next_step():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)).to("tpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.ones(3, 4).to("tpu")
    counts = []
    for _ in range(5):
        before = torch.tpu.compile_stats()["segments_run"]
        model(x).square().mean().backward()
        optimizer.step()
        torch.tpu.Event(enable_timing=True).record()
        optimizer.zero_grad()
        counts.append(torch.tpu.compile_stats()["segments_run"] - before)
    torch.tpu.synchronize()
    assert counts[-1] == 1, counts


def test_what_was_waited_for_is_done():
    matrix = torch.full((128, 128), 1.0 / 128, device="tpu")
    asked = []
    for _ in range(200):  # results were a moment behind in one of 40
        matrix = matrix @ matrix
        event = torch.Event("tpu")
        event.record()
        event.synchronize()
        asked.append(event.query())
    assert all(asked)
