"""Sizes as they grow: a number of a program that depends on one size T; a dim longer than what counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class NotPaddableError(Exception):
    """Nothing proves that a longer program computes the same: the segment is compiled for its own sizes."""


@dataclass(frozen=True)
class Linear:
    """The number ``slope * T + rest``."""

    slope: int
    rest: int

    def at(self, size: int) -> int:
        return self.slope * size + self.rest


Number = int | Linear


@dataclass(frozen=True)
class Examples:
    """The two values of T that a program is known for."""

    first: int
    second: int

    def solve(self, first: int, second: int) -> Number:
        """The number that was `first` at the first size and `second` at the other."""
        if first == second:
            return first
        slope, left = divmod(second - first, self.second - self.first)
        if left:
            raise NotPaddableError(f"{first} and {second} do not grow with the size")
        return Linear(slope, first - slope * self.first)


@dataclass(frozen=True)
class Grown:
    """A dim of `blocks` equal blocks; of each the first ``slope * T + rest`` places count."""

    blocks: int
    length: Linear

    def at(self, size: int) -> int:
        return self.blocks * self.length.at(size)


Dim = int | Grown


def grown(number: Number, blocks: int = 1) -> Dim:
    """A dim of this size whose places count from the first on."""
    if isinstance(number, int):
        return blocks * number
    if number.slope < 0:
        raise NotPaddableError("a dim shrinks as the size grows")
    return Grown(blocks, number)


def size_at(dim: Dim, size: int) -> int:
    return dim if isinstance(dim, int) else dim.at(size)


def is_grown(dims: Sequence[Dim]) -> bool:
    return any(isinstance(dim, Grown) for dim in dims)


def regrouped(dims: Sequence[Dim], sizes: Sequence[Number]) -> tuple[Dim, ...]:
    """The dims of an array of these dims that is reshaped to `sizes`, in memory order.

    A dim is a product of factors: its blocks, then what grows. Factors keep their order, so each new dim is a
    run of them. What grows may be split, (T * 384,) into (T, 384): that does not move what counts.
    """
    factors: list[int | Linear] = []  # that are left, the first one last
    for dim in reversed(dims):
        if isinstance(dim, int):
            factors.append(dim)
        else:
            factors += [dim.length, dim.blocks]
    result = [_taken(factors, size) for size in sizes]
    if any(factor != 1 for factor in factors):
        raise NotPaddableError(f"a reshape to {sizes} takes a dim that grows apart")
    return tuple(result)


def _taken(factors: list[int | Linear], size: Number) -> Dim:
    """One dim off the factors."""
    blocks, length = 1, None
    rest = size
    while rest != 1:
        if not factors:
            raise NotPaddableError("a reshape takes a dim that grows apart")
        factor = factors.pop()
        if isinstance(factor, int):
            if isinstance(rest, int) and factor % rest == 0:
                part, left = rest, factor // rest
            elif _divides(factor, rest):
                part, left = factor, 1
            else:
                raise NotPaddableError("a reshape takes a dim that grows apart")
            rest = _divided(rest, part)
            if length is None:
                blocks *= part
            else:
                length = Linear(length.slope * part, length.rest * part)
            if left != 1:
                factors.append(left)
            continue
        if length is not None or isinstance(rest, int):
            raise NotPaddableError("a reshape takes a dim that grows apart")
        if (inner := _ratio(rest, factor)) is not None:  # all of it, and more behind it
            length, rest = factor, inner
        elif (inner := _ratio(factor, rest)) is not None:
            length, rest = rest, 1
            factors.append(inner)
        else:
            raise NotPaddableError("a reshape takes a dim that grows apart")
    return blocks if length is None else Grown(blocks, length)


def _divides(factor: int, number: Number) -> bool:
    if factor == 0:
        return False
    if isinstance(number, int):
        return number % factor == 0
    return number.slope % factor == 0 and number.rest % factor == 0


def _divided(number: Number, factor: int) -> Number:
    if isinstance(number, int):
        return number // factor
    return Linear(number.slope // factor, number.rest // factor)


def _ratio(larger: Linear, smaller: Linear) -> int | None:
    """The whole number that one is of the other, if it is one for every T."""
    ratio, left = divmod(larger.slope, smaller.slope)
    is_whole = left == 0 and ratio >= 1 and larger.rest == ratio * smaller.rest
    return ratio if is_whole else None
