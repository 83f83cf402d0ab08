"""Small decisions read off one integer, for property tests that draw many of them.

One integer an operation is quick for hypothesis to draw, and smaller integers decode to earlier choices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

Option = TypeVar("Option")


class Choices:
    def __init__(self, code: int) -> None:
        self.code = code

    def below(self, count: int) -> int:
        self.code, choice = divmod(self.code, count)
        return choice

    def among(self, options: Sequence[Option]) -> Option:
        return options[self.below(len(options))]
