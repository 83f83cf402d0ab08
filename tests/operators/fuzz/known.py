"""Differences that are known, each with its reason. One is found by the call that the program ends in."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tests.operators.fuzz.check import Failure
from tests.operators.fuzz.program import Program


@dataclass(frozen=True)
class Known:
    reason: str
    kind: str
    call: str  # a pattern in the last line of the minimised program
    said: str = ""  # a pattern in what differs


KNOWN: list[Known] = []


def reason_for(program: Program, failure: Failure) -> str | None:
    last = program.lines[-1].text
    for known in KNOWN:
        if known.kind == failure.kind and re.search(known.call, last) and re.search(known.said, failure.text):
            return known.reason
    return None
