"""Programs are given back before the system refuses to load more of them: XLA would end the process."""

import json
from pathlib import Path

import pytest
import torch

from tests.backend.fresh_process import run_python
from tpu_backend.runtime import mappings

# In a process of its own, where nothing else was loaded: the older half is what this script did first.
SCRIPT = """
    import json
    import torch
    from tpu_backend.runtime import mappings

    mappings._SHORT_FROM = 0.0
    BETWEEN_LOOKS = 8  # programs, as in csrc/launch/program.cpp
    compilations = lambda: torch.tpu.compile_stats()["compilations"]
    numbers = torch.arange(1.0, 9.0, device="tpu")
    torch.tpu.synchronize()
    weighted = lambda: (numbers * 3).cumsum(0)[-1].item()
    found = {"weighted": [weighted()], "errors": []}

    def look_up():
        try:
            numbers[torch.tensor([8], device="tpu")].sum().item()
        except IndexError as error:
            found["errors"].append(str(error).splitlines()[0])

    weight = torch.nn.Parameter(torch.ones(3, device="tpu"))
    optimizer = torch.optim.SGD([weight], lr=0.5)

    @torch.tpu.capture
    def step(inputs):
        loss = (weight * inputs).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    inputs = torch.ones(3, device="tpu")
    found["losses"] = [step(inputs).item() for _ in range(4)]
    look_up()

    for size in range(100, 100 + 4 * BETWEEN_LOOKS):
        total = torch.ones(size, device="tpu").sum().item()
    before = compilations()
    torch.ones(size, device="tpu").sum().item()
    found["of the last"] = compilations() - before

    before = compilations()
    found["losses"] += [step(inputs).item() for _ in range(2)]
    found["of the captured"] = compilations() - before

    before = compilations()
    found["weighted"].append(weighted())
    found["of the first"] = compilations() - before
    found["cause"] = torch.tpu.compilations()[-1].cause.kind
    look_up()
    print(json.dumps(found))
"""


def test_what_was_not_used_for_longest_is_compiled_again() -> None:
    result = run_python(SCRIPT)
    assert result.returncode == 0, result.stderr
    error = "index 8 is out of bounds for dimension 0 with size 8"
    assert json.loads(result.stdout) == {
        "weighted": [108.0, 108.0],
        "errors": [error, error],
        "losses": [3.0, 1.5, 0.0, -1.5, -3.0, -4.5],
        "of the last": 0,
        "of the captured": 0,
        "of the first": 1,
        "cause": "room",
    }


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="mappings are counted on Linux")
def test_mappings_are_counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    torch.tpu.synchronize()
    most = tmp_path / "max_map_count"
    monkeypatch.setattr(mappings, "_MOST", most)
    most.write_text("1000000\n")
    assert not mappings.is_room_short()
    most.write_text("10\n")
    assert mappings.is_room_short()
    monkeypatch.setattr(mappings, "_MOST", tmp_path / "nothing")
    assert not mappings.is_room_short()


def test_a_program_that_is_run_is_not_given_back_by_a_finalizer() -> None:
    """While one is launched memory is allocated: the collector may run, and finalizers with programs."""
    result = run_python(
        """
        import gc
        import torch
        from tpu_backend.runtime import mappings

        mappings._SHORT_FROM = 0.0
        numbers = torch.ones(3, device="tpu")
        sizes = iter(range(100, 1000))
        doubled = lambda: (numbers * 2).sum()
        new_program = lambda: torch.ones(next(sizes), device="tpu").sum().item()

        class Cycle:
            def __init__(self):
                self.me = self

            def __del__(self):
                gc.disable()
                for _ in range(17):  # two looks
                    new_program()

        gc.disable()
        doubled().item()
        for allocations in range(1, 16):
            new_program()
            gc.collect()
            Cycle()
            total = doubled()
            gc.set_threshold(allocations, 1, 1)
            gc.enable()
            assert total.item() == 6
            gc.disable()
        print("done")
        """
    )
    assert result.stdout == "done\n", result.stderr


def test_a_rehearsal_prepares_what_was_given_back() -> None:
    result = run_python(
        """
        import time
        import torch
        from tpu_backend.runtime import mappings

        mappings._SHORT_FROM = 0.0
        numbers = torch.ones(3, device="tpu")
        torch.tpu.synchronize()
        step = lambda: (numbers * 2).cumsum(0)
        step().cpu()
        for size in range(100, 132):
            torch.ones(size, device="tpu").sum().item()
        mappings._SHORT_FROM = 1.0
        with torch.tpu.rehearsal():
            rehearsed = step()
        while torch.tpu.is_compiling_ahead():
            time.sleep(0.01)
        before = torch.tpu.compilations()
        kept = step()
        torch.tpu.synchronize()
        print(before[-1].cause.kind, len(torch.tpu.compilations()) - len(before))
        """
    )
    assert result.stdout == "room 0\n", result.stdout + result.stderr
