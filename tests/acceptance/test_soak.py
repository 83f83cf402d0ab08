"""The soak's bars let the noise of memory pass, and nothing that grows."""

import random
from dataclasses import replace

import pytest

from tests.acceptance.soak import MIB, Held, bars

KIB = 1024


def samples(leak_bytes: float = 0.0, seed: int = 0) -> list[Held]:
    """A run of 5,000 steps: most looks find temporaries of a step, and what is in use varies a little."""
    choice = random.Random(seed)
    held = []
    for step in range(20, 5001, 20):
        used = int(120 * MIB + choice.choice([0, 5, 10, 10]) * MIB + choice.uniform(0, 400 * KIB))
        leaked = int(step * leak_bytes)
        resident = 710 * MIB + choice.randrange(10 * MIB) + leaked
        held.append(Held(step, used + leaked, resident, 8 * MIB, 12, 30, 9))
    return held


def failing(held: list[Held]) -> list[str]:
    return [row.name for row in bars(held) if not row.holds]


@pytest.mark.parametrize("seed", range(20))
def test_noise_passes_and_a_leak_of_a_kibibyte_a_step_does_not(seed):
    assert failing(samples(seed=seed)) == []
    assert failing(samples(leak_bytes=KIB, seed=seed)) == ["memory in use: growth, KiB a step"]


@pytest.mark.parametrize("name", ["device_bytes", "threads", "open_files", "programs"])
def test_one_more_of_anything_else_fails(name):
    held = samples()
    held[-1] = replace(held[-1], **{name: getattr(held[-1], name) + 1})
    assert failing(held) == [f"{name.replace('_', ' ')}: growth"]


def test_memory_that_malloc_does_not_know_of_is_seen_as_resident():
    held = samples()
    grown = [replace(one, resident_bytes=one.resident_bytes + 8 * KIB * one.step) for one in held]
    assert failing(grown) == ["resident memory: growth"]
