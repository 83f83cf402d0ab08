"""The table is made of what the compilations report."""

import pytest

from tests.benchmarks import plan_table

GIB = 2**30


def test_our_step_is_compared_with_the_better_of_the_jax_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    figures = {
        "ours": (1, 3, 0.012),
        "ours-autocast": (1, 1, 0.001),
        "jax": (1, 1, 0.020),
        "jax-kernels": (1, 2, 0.015),
        "jax-unrolled": (1, 4, 0.010),
    }

    def compiled(name: str, side: str) -> dict[str, float] | str:
        if name == "1b-v5e" and side == "ours":
            return "the compiler needs 20.0 GiB"
        arguments, temporaries, seconds = figures[side]
        found = {"arguments": arguments * GIB, "temporaries": temporaries * GIB, "seconds": seconds}
        return found | {"compile_seconds": 60.0, "resident": 2.0}

    monkeypatch.setattr(plan_table, "compiled", compiled)
    lines = plan_table.table(["one-chip", "1b-v5e"])
    assert "| one-chip | jax-unrolled | 60 | 2.0 | 1.00 | 4.00 | 10 |" in "\n".join(lines)
    assert "| one-chip | ours / JAX | | | memory 2.000 | | 1.200 | |" in lines
    assert "| 1b-v5e | ours | the compiler needs 20.0 GiB | | | | | |" in lines
    assert not any("1b-v5e | ours / JAX" in line or "1b-v5e | jax-unrolled" in line for line in lines)
    assert len(lines) == 2 + 6 + 5
