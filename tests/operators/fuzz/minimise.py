"""The shortest program that still fails in the same way."""

from __future__ import annotations

from tests.operators.fuzz.check import Failure, check
from tests.operators.fuzz.program import Program


def minimised(program: Program, failure: Failure) -> tuple[Program, Failure]:
    shortened = True
    while shortened:
        shortened = False
        for position in reversed(range(len(program.lines))):
            lines = program.lines[:position] + program.lines[position + 1 :]
            shorter = Program(lines, program.mode)
            found = _same_failure(shorter, failure)
            if found is not None:
                program, failure, shortened = shorter, found, True
    return program, failure


def _same_failure(program: Program, failure: Failure) -> Failure | None:
    found = check(program)
    if found is None or found.kind != failure.kind or "NameError" in found.text:
        return None
    return found
