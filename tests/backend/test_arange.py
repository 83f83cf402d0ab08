"""Ranges: their numbers make their length, so another length must be another program."""

from __future__ import annotations

import torch


def test_ranges_of_changing_length_have_their_own_length() -> None:
    for stop in (3, 12, 5, 3):
        assert torch.arange(stop, device="tpu").tolist() == list(range(stop))
        assert torch.arange(2, stop + 3, 2, device="tpu").tolist() == list(range(2, stop + 3, 2))
        assert torch.arange(0.5, stop, device="tpu").tolist() == torch.arange(0.5, stop).tolist()


def test_whole_numbers_spaced_by_whole_numbers_are_met() -> None:
    for start, end, steps in ((50, 1, 50), (0, 98, 50), (-7, 7, 15)):
        numbers = torch.linspace(start, end, steps, dtype=torch.int32, device="tpu")
        assert torch.equal(numbers.cpu(), torch.linspace(start, end, steps, dtype=torch.int32))


def test_a_range_that_starts_elsewhere_is_no_other_program() -> None:
    torch.arange(1, 5, device="tpu").tolist()
    before = torch.tpu.compile_stats()["compilations"]
    for start in range(2, 20):
        assert torch.arange(start, start + 4, device="tpu").tolist() == list(range(start, start + 4))
    assert torch.tpu.compile_stats()["compilations"] == before
