"""Where a sequence repeats itself: there a long segment is cut, so that equal stretches share one program."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np


class Repeat(NamedTuple):
    """`times` equal stretches of `length` words each, one behind the other."""

    begin: int
    length: int
    times: int

    @property
    def end(self) -> int:
        return self.begin + self.length * self.times

    @property
    def saved(self) -> int:
        """Words that another stretch has already."""
        return (self.times - 1) * self.length

    def stretches(self) -> Iterator[tuple[int, int]]:
        """Begin and end of each."""
        for begin in range(self.begin, self.end, self.length):
            yield begin, begin + self.length


def find_repeats(words: np.ndarray, cost: np.ndarray, shortest: int) -> list[Repeat]:
    """The repeats in `words`, in order and apart from each other.

    They are found greedily: first the one that saves most words, then those on both sides of it. None is
    shorter than `shortest`. A repeat that may begin at several places begins at the one of least `cost`,
    which has a number for each place.
    """
    found: list[Repeat] = []
    _find(words, cost, shortest, 0, len(words), found)
    return found


def _find(
    words: np.ndarray, cost: np.ndarray, shortest: int, begin: int, end: int, found: list[Repeat]
) -> None:
    best = _best(words, cost, shortest, begin, end)
    if best is None:
        return
    _find(words, cost, shortest, begin, best.begin, found)
    found.append(best)
    _find(words, cost, shortest, best.end, end, found)


def _best(words: np.ndarray, cost: np.ndarray, shortest: int, begin: int, end: int) -> Repeat | None:
    best, saved = None, 0
    for length in range(shortest, (end - begin) // 2 + 1):
        if (end - begin) // length * length - length <= saved:
            continue  # no repeat of this length can save more
        # Runs of words that are the same one `length` further on.
        equal = words[begin : end - length] == words[begin + length : end]
        ends = np.append(np.flatnonzero(~equal), len(equal))
        sizes = np.diff(ends, prepend=-1) - 1
        longest = int(np.argmax(sizes // length))
        size = int(sizes[longest])
        if size // length * length > saved:
            first = begin + int(ends[longest]) - size
            cheapest = first + int(np.argmin(cost[first : first + size % length + 1]))
            best = Repeat(cheapest, length, 1 + size // length)
            saved = best.saved
    return best
