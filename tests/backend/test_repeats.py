"""`find_repeats`: where a sequence repeats itself."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tpu_backend.runtime.repeats import Repeat, find_repeats


def repeats_in(words: list[int], shortest: int = 1, cost: list[int] | None = None) -> list[Repeat]:
    return find_repeats(np.array(words), np.array(cost or [0] * (len(words) + 1)), shortest)


def most_saved(words: list[int], shortest: int) -> int:
    """By trying every begin and length."""
    most = 0
    for length in range(shortest, len(words) // 2 + 1):
        for begin in range(len(words) - length):
            times, stretch = 1, words[begin : begin + length]
            while words[begin + times * length : begin + (times + 1) * length] == stretch:
                times += 1
            most = max(most, (times - 1) * length)
    return most


@given(st.lists(st.integers(0, 2), max_size=24), st.integers(1, 4))
def test_repeats_are_apart_and_equal_and_the_best_one_is_among_them(words, shortest):
    found = repeats_in(words, shortest)
    assert max((repeat.saved for repeat in found), default=0) == most_saved(words, shortest)
    done = 0
    for repeat in found:
        assert repeat.begin >= done
        assert repeat.length >= shortest
        assert repeat.times >= 2
        stretches = [words[begin:end] for begin, end in repeat.stretches()]
        assert all(stretch == stretches[0] for stretch in stretches)
        done = repeat.end
    assert done <= len(words)


def test_a_repeat_begins_where_it_costs_least():
    words = [1, 2, 3, 4] * 3 + [1, 2]  # it may begin at 0, 1 or 2
    for cheapest in range(3):
        cost = [int(place != cheapest) for place in range(len(words) + 1)]
        assert repeats_in(words, 4, cost) == [Repeat(cheapest, 4, 3)]


def test_what_is_left_on_both_sides_is_looked_at():
    words = [7, 8] * 2 + [1, 2, 3] * 4 + [5] + [8, 9] * 2
    assert repeats_in(words, 2) == [Repeat(0, 2, 2), Repeat(4, 3, 4), Repeat(17, 2, 2)]


def test_where_nothing_repeats_nothing_is_found():
    assert repeats_in([1, 2, 3, 4]) == repeats_in([]) == repeats_in([1]) == []
